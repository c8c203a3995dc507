"""Fetches a model directory by huggingface_hub's client: whole or absent, each file checked, and after an interruption continued.

Files are written into a hidden directory beside the target, which becomes it when all are there. The client's own download begins
a file anew after a kill (its temporary file has a new name each time), so only its requests are used: listing, metadata, and the
transfer, which continues from a given byte. Endpoint, token and proxies are those of its environment variables.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mindllm.errors import RunFailed, UserError
from mindllm.fetch.choice import RemoteFile, chosen
from mindllm.fetch.names import PUBLISHED
from mindllm.outside import open_file
from mindllm.terminal.progress import Progress, unwatched

UNFINISHED = ".incomplete"
LOCK = ".lock"
PIECE = 4 << 20
LEFT_FREE = 100 << 20  # bytes of the disk
MOST_FILES = 10_000


@dataclass(frozen=True)
class Listing:
    """What the hub says of a model at one commit."""

    repository: str
    commit: str
    files: tuple[RemoteFile, ...]
    licence: str | None
    gated: bool

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def published(name: str) -> str:
    """Return the hub's name of a model: its own, or that of a shipped one whose place is known.

    Raises:
        UserError: it is neither.
    """
    if name in PUBLISHED:
        return PUBLISHED[name]
    if name.count("/") != 1 or not all(name.split("/")):
        raise UserError(
            f"{name}: neither the name of a model on the hub (ORGANISATION/MODEL) nor a shipped model whose place there is known "
            f"({', '.join(sorted(PUBLISHED)[:5])}, ...; mindllm models lists the shipped ones)"
        )
    return name


def list_files(repository: str, revision: str = "main", include: Sequence[str] = ()) -> Listing:
    """Ask the hub what files of a model there are to fetch.

    Raises:
        UserError: there is no such model or revision, it wants a login, or it has no weights that are taken.
        RunFailed: the hub cannot be reached, or answers with an error.
    """
    from huggingface_hub import HfApi

    with _told(repository, revision):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    files = tuple(_file(repository, sibling) for sibling in info.siblings or [])
    if len(files) > MOST_FILES:
        raise UserError(f"{repository}: lists {len(files):,} files; no model has over {MOST_FILES:,}")
    card = info.card_data.to_dict() if info.card_data else {}
    tags = [tag.partition(":")[2] for tag in info.tags or [] if tag.startswith("license:")]
    licence = card.get("license_name") or card.get("license") or next(iter(tags), None)
    return Listing(
        repository, str(info.sha), tuple(chosen(repository, files, include)), licence and str(licence), bool(info.gated)
    )


def fetch(listing: Listing, directory: Path, progress: Progress = unwatched) -> Path:
    """Write the files of ``listing`` as ``directory``; what an earlier call has written of them is not asked for again.

    Raises:
        UserError: the directory is there and not empty, or another call is writing it.
        RunFailed: the disk is too small, the network fails, or a file is not what the hub says it is.
    """
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise UserError(f"{directory}: is there already; give another --output, or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    kept = directory.with_name(f".{directory.name}.fetch")
    kept.mkdir(exist_ok=True)
    with _alone(kept):
        _remove_others(kept, listing)
        whole = {
            file.name for file in listing.files if (kept / file.name).is_file() and not _problem(kept / file.name, file)
        }
        there = sum(_size(_place(kept, file)) for file in listing.files if file.name not in whole)
        there += sum(file.size for file in listing.files if file.name in whole)
        _refuse_if_full(kept, listing.size - there)
        done = sum(file.size for file in listing.files if file.name in whole)
        for file in listing.files:
            if file.name not in whole:
                _fetch_one(
                    listing, file, kept, lambda size, before=done: progress("fetching", before + size, listing.size)
                )
                done += file.size
            progress("fetching", done, listing.size)
        if directory.is_dir():
            directory.rmdir()
        (kept / LOCK).unlink()
        kept.rename(directory)
    return directory


def _file(repository: str, sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    size = lfs.size if lfs else sibling.size
    if type(size) is not int or size < 0:
        raise RunFailed(f"{repository}: the hub does not say how large {sibling.rfilename} is")
    return RemoteFile(sibling.rfilename, size, lfs.sha256 if lfs else "", "" if lfs else sibling.blob_id or "")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with open(directory / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{directory}: another command is fetching into it") from None
        yield


def _remove_others(kept: Path, listing: Listing) -> None:
    """Remove what an earlier call wrote of another commit."""
    wanted = {LOCK, *(file.name for file in listing.files)}
    wanted |= {_place(kept, file).relative_to(kept).as_posix() for file in listing.files}
    for path in kept.rglob("*"):
        if not path.is_dir() and path.relative_to(kept).as_posix() not in wanted:
            path.unlink()


def _refuse_if_full(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed + LEFT_FREE > free:
        raise RunFailed(
            f"{directory.parent}: {needed / 1e9:.2f} GB are to be fetched and {free / 1e9:.2f} GB are free; "
            "give --output elsewhere"
        )


def _place(kept: Path, file: RemoteFile) -> Path:
    """Where a file is written until it is whole: its content's own place, so that nothing else is ever continued there."""
    return kept / f"{file.name}.{(file.sha256 or file.blob)[:16]}{UNFINISHED}"


def _fetch_one(listing: Listing, file: RemoteFile, kept: Path, done: Any) -> None:
    unfinished = _place(kept, file)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if (
        not file.sha256 or _size(unfinished) > file.size
    ):  # small ones come compressed, which has no places to continue from
        unfinished.unlink(missing_ok=True)
    _transfer(listing, file, unfinished, done)
    if problem := _problem(unfinished, file):
        unfinished.unlink()
        raise RunFailed(f"{file.name} of {listing.repository}: {problem}; it is removed, fetch again")
    unfinished.replace(kept / file.name)


def _transfer(listing: Listing, file: RemoteFile, path: Path, done: Any) -> None:
    from urllib.parse import urlsplit

    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import get_hf_file_metadata, http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    disable_progress_bars()
    url = hf_hub_url(listing.repository, file.name, revision=listing.commit)
    headers = build_hf_headers()
    with _told(listing.repository, listing.commit), open(path, "ab", buffering=0) as content:
        place = get_hf_file_metadata(url, headers=headers).location or url
        if urlsplit(place).netloc != urlsplit(url).netloc:  # where the file is kept, which needs no token of the hub's
            headers = {key: value for key, value in headers.items() if key.lower() != "authorization"}
        before = content.tell()
        done(before)
        counted: Any = _Counted(content, done)
        http_get(place, counted, resume_size=before, headers=headers, expected_size=file.size)
        os.fsync(content.fileno())


class _Counted:
    """A file that tells how long it is."""

    def __init__(self, file: IO[bytes], done: Any) -> None:
        self.file, self.done = file, done

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            view = view[self.file.write(view) :]
        self.done(self.file.tell())
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _problem(path: Path, file: RemoteFile) -> str:
    """What is wrong with a file, by size and checksum; nothing where it is what the hub has."""
    size = _size(path)
    if size != file.size:
        return f"has {size:,} bytes, the hub's {file.size:,}"
    if not file.sha256 and not file.blob:
        return ""
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with open_file(path) as content:
        while piece := content.read(PIECE):
            digest.update(piece)
    found, wanted = digest.hexdigest(), file.sha256 or file.blob
    return "" if found == wanted else f"its checksum is {found[:16]}…, the hub's {wanted[:16]}…: it is corrupted"


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
