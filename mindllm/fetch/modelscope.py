"""ModelScope, by the requests of its own client: a model's card, the list of its files, and the transfer from a given byte.

Its client is not imported. Its releases share the protocol (modelscope 1.28 and modelscope_hub 0.5 ask alike) but not their
Python interfaces; it reads a login from a pickle, and writes an identity of this user into the home directory. Endpoint, token
and timeout are those of its environment variables, proxies those that httpx reads.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from mindllm.errors import RunFailed, UserError, shortened
from mindllm.fetch.choice import RemoteFile
from mindllm.fetch.hub import Hub, Listing
from mindllm.fetch.names import PUBLISHED_ON_MODELSCOPE
from mindllm.versions import __version__

if TYPE_CHECKING:
    import httpx

ENDPOINT = "https://modelscope.cn"
CONNECT_SECONDS = 10
MOST_LISTED = 3000  # files, at which the hub's list ends without a word
LONGEST_ANSWER = 64 << 20  # bytes of JSON
TRIES = 5  # without a byte between them
SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelScope(Hub):
    """ModelScope, or another place that speaks its protocol (``MODELSCOPE_ENDPOINT``)."""

    title = "ModelScope"
    default_revision = "master"
    published = PUBLISHED_ON_MODELSCOPE

    def describe(self, repository: str, revision: str) -> Listing:
        """Return all files of a model; see ``Hub.describe``."""
        with _told(repository), _client() as client:
            card = _ask(
                client, repository, "", {}, "the hub has no such model, or it is private (MODELSCOPE_API_TOKEN)"
            )
            asked = {"Revision": revision, "Recursive": "True"}
            listed = _ask(client, repository, "/repo/files", asked, f"has no such revision (value {revision})")
        entries = listed.get("Files")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise RunFailed(f"{repository}: {endpoint()} answers without a list of files")
        if len(entries) >= MOST_LISTED:
            raise UserError(f"{repository}: the hub lists {MOST_LISTED:,} files and stops there; there may be more")
        files = tuple(_file(repository, entry) for entry in entries if entry.get("Type") != "tree")
        licence = card.get("License")
        return Listing(self, repository, revision, None, files, str(licence) if licence else None)

    def transfer(self, listing: Listing, file: RemoteFile, content: IO[bytes]) -> None:
        """Append what is missing of a file; see ``Hub.transfer``. A connection that breaks is made again."""
        import httpx

        failures = 0
        with _told(listing.repository), _client() as client:
            while True:
                before = content.tell()
                try:
                    return _receive(client, listing, file, content)
                except (httpx.TransportError, httpx.HTTPStatusError) as error:
                    failures = 0 if content.tell() > before else failures + 1
                    if failures == TRIES or not _passing(error):
                        raise
                time.sleep(failures)


def endpoint() -> str:
    """Return where the hub is: ``MODELSCOPE_ENDPOINT``, else ``MODELSCOPE_DOMAIN``, else ModelScope itself."""
    given = os.environ.get("MODELSCOPE_ENDPOINT", "").strip() or os.environ.get("MODELSCOPE_DOMAIN", "").strip()
    return (given if "://" in given else f"https://{given}").rstrip("/") if given else ENDPOINT


def _client() -> httpx.Client:
    import httpx

    headers = {"User-Agent": f"mindllm/{__version__}", "Accept-Encoding": "identity"}
    if token := os.environ.get("MODELSCOPE_API_TOKEN", "").strip():
        # Older parts of the hub know a login by the cookie, newer ones by the header; a redirection elsewhere gets neither.
        headers |= {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"}
    timeout = httpx.Timeout(_seconds("MODELSCOPE_DOWNLOAD_TIMEOUT", 60), connect=CONNECT_SECONDS)
    return httpx.Client(headers=headers, timeout=timeout, follow_redirects=True)


def _seconds(variable: str, usual: float) -> float:
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else usual
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{variable}: must be a number of seconds above 0 (value {text})")
    return seconds


def _url(repository: str, rest: str) -> str:
    return f"{endpoint()}/api/v1/models/{quote(repository)}{rest}"


def _ask(client: httpx.Client, repository: str, rest: str, asked: dict[str, str], missing: str) -> dict[str, Any]:
    """Return the ``Data`` of an answer in JSON; where it is not found, ``missing`` is the mistake."""
    with client.stream("GET", _url(repository, rest), params=asked) as response:
        if response.status_code == 404:
            raise UserError(f"{repository}: {endpoint()}: {missing}")
        response.raise_for_status()
        text = bytearray()
        for piece in response.iter_bytes():
            text += piece
            if len(text) > LONGEST_ANSWER:
                raise RunFailed(f"{repository}: {endpoint()} answers with over {LONGEST_ANSWER >> 20} MiB of JSON")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise RunFailed(f"{repository}: {endpoint()} answers with no JSON object: is it ModelScope?")
    if answer.get("Code", 200) != 200 or not isinstance(answer.get("Data"), dict):
        raise RunFailed(f"{repository}: {endpoint()} answers: {shortened(str(answer.get('Message') or 'no data'))}")
    return dict(answer["Data"])


def _file(repository: str, entry: dict[str, Any]) -> RemoteFile:
    name, size, checksum = entry.get("Path"), entry.get("Size"), str(entry.get("Sha256") or "").lower()
    if not isinstance(name, str) or type(size) is not int or size < 0:
        raise RunFailed(f"{repository}: the hub does not say how large {shortened(str(name))} is")
    if checksum and not SHA256.fullmatch(checksum):
        raise RunFailed(f"{repository}: what the hub gives of {shortened(name)} is no SHA-256 ({shortened(checksum)})")
    return RemoteFile(name, size, checksum)


def _receive(client: httpx.Client, listing: Listing, file: RemoteFile, content: IO[bytes]) -> None:
    start = content.tell()
    if start >= file.size:
        return
    asked = {"Revision": listing.revision, "FilePath": file.name}
    headers = {"Range": f"bytes={start}-"} if start else {}
    with client.stream("GET", _url(listing.repository, "/repo"), params=asked, headers=headers) as response:
        response.raise_for_status()
        continues = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
            f"bytes {start}-"
        )
        if start and not continues:  # all of it comes again
            content.seek(0)
            content.truncate()
        for piece in response.iter_bytes():  # as they come: a break loses none that had come
            content.write(piece)
            if content.tell() > file.size:
                return  # which is not the file that is listed


def _passing(error: Exception) -> bool:
    """Whether a failure may be over a little later."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return not isinstance(error, (httpx.UnsupportedProtocol, httpx.ProxyError))


@contextmanager
def _told(repository: str) -> Iterator[None]:
    """Errors of the transport in a line."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code in (401, 403):
            raise UserError(
                f"{repository}: {endpoint()} does not give it without a login, or not to this one ({code}); accept its licence "
                "on its page where it has one, and set MODELSCOPE_API_TOKEN"
            ) from None
        raise RunFailed(f"{repository}: {endpoint()} answers: {code} {error.response.reason_phrase}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunFailed(
            f"{repository}: {endpoint()}: {reason}; run again to continue (MODELSCOPE_ENDPOINT and HTTPS_PROXY say where and how)"
        ) from None
