"""Hugging Face's hub, by the requests of huggingface_hub's client: listing, metadata, and the transfer from a given byte.

The client's own download begins a file anew after a kill (its temporary file has a new name each time). Endpoint, token and
proxies are those of its environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from mindllm.errors import RunFailed, UserError
from mindllm.fetch.choice import RemoteFile
from mindllm.fetch.hub import Hub, Listing
from mindllm.fetch.names import PUBLISHED


class HuggingFace(Hub):
    """Hugging Face's hub, or one that speaks its protocol (``HF_ENDPOINT``)."""

    title = "Hugging Face's hub"
    default_revision = "main"
    published = PUBLISHED

    def describe(self, repository: str, revision: str) -> Listing:
        """Return all files of a model; see ``Hub.describe``."""
        from huggingface_hub import HfApi

        with _told(repository, revision):
            info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        files = tuple(_file(repository, sibling) for sibling in info.siblings or [])
        card = info.card_data.to_dict() if info.card_data else {}
        tags = [tag.partition(":")[2] for tag in info.tags or [] if tag.startswith("license:")]
        licence = card.get("license_name") or card.get("license") or next(iter(tags), None)
        commit = str(info.sha)
        return Listing(self, repository, commit, commit, files, licence and str(licence))

    def transfer(self, listing: Listing, file: RemoteFile, content: IO[bytes]) -> None:
        """Append what is missing of a file; see ``Hub.transfer``."""
        from urllib.parse import urlsplit

        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import get_hf_file_metadata, http_get
        from huggingface_hub.utils import build_hf_headers, disable_progress_bars

        disable_progress_bars()
        url = hf_hub_url(listing.repository, file.name, revision=listing.revision)
        headers = build_hf_headers()
        with _told(listing.repository, listing.revision):
            place = get_hf_file_metadata(url, headers=headers).location or url
            if (
                urlsplit(place).netloc != urlsplit(url).netloc
            ):  # where the file is kept, which needs no token of the hub's
                headers = {key: value for key, value in headers.items() if key.lower() != "authorization"}
            sink: Any = content
            http_get(place, sink, resume_size=content.tell(), headers=headers, expected_size=file.size)


def _file(repository: str, sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    size = lfs.size if lfs else sibling.size
    if type(size) is not int or size < 0:
        raise RunFailed(f"{repository}: the hub does not say how large {sibling.rfilename} is")
    return RemoteFile(sibling.rfilename, size, lfs.sha256 if lfs else "", "" if lfs else sibling.blob_id or "")


@contextmanager
def _told(repository: str, revision: str) -> Iterator[None]:
    """Errors of the client in a line."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise UserError(
            f"{repository}: its licence must be accepted on its page first; then log in: hf auth login, or set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{repository}: {constants.ENDPOINT} has no such model, or it is private (hf auth login, or set HF_TOKEN)"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{repository}: has no such revision (value {revision})") from None
    except HFValidationError as error:
        raise UserError(f"{repository}: {str(error).splitlines()[0]}") from None
    except OfflineModeIsEnabled:
        raise RunFailed(f"{repository}: HF_HUB_OFFLINE is set, so nothing is fetched") from None
    except HfHubHTTPError as error:
        raise RunFailed(f"{repository}: {constants.ENDPOINT} answers: {str(error).splitlines()[0]}") from None
    except (httpx.HTTPError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # of a file here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunFailed(
            f"{repository}: {constants.ENDPOINT}: {reason}; run again to continue (HF_ENDPOINT and HTTPS_PROXY say where and how)"
        ) from None
