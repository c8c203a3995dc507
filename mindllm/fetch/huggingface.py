"""Hugging Face's hub. Address and login are those that the library ``huggingface_hub`` finds; its downloads are not used.

They have no bound on what a hub sends, and a download that was killed begins anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mindllm.errors import RunFailed, shortened
from mindllm.fetch.hub import PUBLISHED, Hub
from mindllm.fetch.listing import GIT_HASH, Listing, RemoteFile, check_file, check_files, check_license

if TYPE_CHECKING:
    import httpx


class HuggingFace(Hub):
    """Hugging Face's hub, or a server with its protocol (``HF_ENDPOINT``)."""

    title = "Hugging Face's hub"
    default_revision = "main"
    published = PUBLISHED
    variables = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_DOWNLOAD_TIMEOUT")

    @property
    def endpoint(self) -> str:
        """Address of the hub, from ``HF_ENDPOINT``."""
        from huggingface_hub import constants

        return constants.ENDPOINT

    def headers(self) -> dict[str, str]:
        """Return the login of ``HF_TOKEN`` or ``hf auth login``."""
        from huggingface_hub.utils import build_hf_headers

        return build_hf_headers()

    def read_listing(self, client: httpx.Client, repository: str, revision: str) -> Listing:
        """Request all files of a model."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise RunFailed(f"{repository}: HF_HUB_OFFLINE is set; unset it to fetch")
        url = f"{self.endpoint}/api/models/{quote(repository)}/revision/{quote(revision, safe='')}"
        answer = self.get_json(client, url, {"blobs": "true"})
        commit = answer.get("sha")
        if not isinstance(commit, str) or not GIT_HASH.fullmatch(commit):
            raise RunFailed(f"{repository}: the hub gives no valid commit ({shortened(commit)})")
        files = check_files(repository, answer.get("siblings"), _read_file)
        return Listing(repository, commit, commit, files, _read_license(answer))

    def file_request(self, listing: Listing, file: RemoteFile) -> tuple[str, dict[str, str]]:
        """Return the address of a file at the listed commit."""
        return f"{self.endpoint}/{quote(listing.repository)}/resolve/{listing.revision}/{quote(file.name)}", {}

    def explain(self, response: httpx.Response, revision: str) -> str:
        """Return advice about a refused request; empty for a failure of the hub."""
        code = response.headers.get("X-Error-Code")
        login = "log in with hf auth login, or set HF_TOKEN"
        if code == "GatedRepo":
            return f"accept the license on the model's page first, then {login}"
        if code == "RevisionNotFound":
            return f"no such revision (value {shortened(revision)})"
        if code in (None, "RepoNotFound") and response.status_code in (401, 404):
            return f"no such model, or it is private ({login})"
        return super().explain(response, revision)


def _read_file(repository: str, entry: dict[str, Any]) -> RemoteFile:
    name, lfs = entry.get("rfilename"), entry.get("lfs")
    if isinstance(lfs, dict):  # the entry's own checksum is that of a pointer
        return check_file(repository, name, lfs.get("size"), lfs.get("sha256"))
    return check_file(repository, name, entry.get("size"), blob=entry.get("blobId"))


def _read_license(answer: dict[str, Any]) -> str | None:
    card, tags = answer.get("cardData"), answer.get("tags")
    card, tags = card if isinstance(card, dict) else {}, tags if isinstance(tags, list) else []
    named = (tag.partition(":")[2] for tag in tags if isinstance(tag, str) and tag.startswith("license:"))
    return check_license(card.get("license_name") or card.get("license") or next(named, None))
