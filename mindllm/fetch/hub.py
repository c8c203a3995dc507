"""Hub: where models are published. Requests of bounded size, shared by all hubs; a subclass has the protocol of one of them."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from mindllm.errors import RunFailed, UserError, nearest, shortened
from mindllm.fetch.listing import Listing, RemoteFile, choose_files
from mindllm.outside import parse_json
from mindllm.versions import __version__

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS, READ_SECONDS = 10, 60
MAX_JSON = 16 << 20
"""Bytes of an answer in JSON: 10,000 files take 5 MB."""
MAX_TRIES = 5
"""Requests in a row that transfer nothing."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class Hub(ABC):
    """A hub and its protocol. The environment sets its address, the login and the proxy.

    Attributes:
        title: name in messages.
        default_revision: branch to fetch where no revision is given.
        published: repositories of the weights of shipped models.
        variables: environment variables of the address, the login and the timeout in seconds.
    """

    title: ClassVar[str]
    default_revision: ClassVar[str]
    published: ClassVar[Mapping[str, str]]
    variables: ClassVar[tuple[str, str, str]]

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Address of the hub, without a slash at its end."""

    @abstractmethod
    def headers(self) -> dict[str, str]:
        """Return the headers that carry the user's login."""

    @abstractmethod
    def read_listing(self, client: httpx.Client, repository: str, revision: str) -> Listing:
        """Request all files of a model."""

    @abstractmethod
    def file_request(self, listing: Listing, file: RemoteFile) -> tuple[str, dict[str, str]]:
        """Return the address and the query of a file."""

    def explain(self, response: httpx.Response, revision: str) -> str:
        """Return what the user can do about a refused request; empty where it is a failure of the hub."""
        if response.status_code not in (401, 403):
            return ""
        return f"access denied ({response.status_code}); accept the license on the model's page and set {self.variables[1]}"

    def list_files(self, repository: str, revision: str | None = None, include: Sequence[str] = ()) -> Listing:
        """Return the files of a model to fetch.

        Raises:
            UserError: the model or revision does not exist, requires a login, or has no weights in a supported format.
            RunFailed: the hub cannot be reached, or its answer is invalid.
        """
        revision = self.default_revision if revision is None else revision
        with self._connect(repository, revision) as client:
            listing = self.read_listing(client, repository, revision)
        return replace(listing, files=tuple(choose_files(repository, listing.files, include)))

    def download(self, listing: Listing, file: RemoteFile, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield pieces of ``file`` with their offsets from ``start`` on; from 0 where the hub does not resume.

        Broken connections are resumed. No piece goes beyond the listed size.

        Raises:
            UserError: the model requires a login.
            RunFailed: the hub cannot be reached, answers with an error, or sends more than it lists.
        """
        import httpx

        failures, end = 0, start
        with self._connect(listing.repository, listing.revision) as client:
            while True:
                before = end
                try:
                    for offset, piece in self._receive(client, listing, file, end):
                        yield offset, piece
                        end = offset + len(piece)
                    return
                except (httpx.TransportError, httpx.HTTPStatusError) as error:
                    failures = 0 if end > before else failures + 1
                    if failures == MAX_TRIES or not _is_transient(error):
                        raise
                time.sleep(failures)

    def repository(self, name: str) -> str:
        """Return the hub's name of a model, given that name or the one of a shipped model.

        Raises:
            UserError: it is neither.
        """
        if name in self.published:
            return self.published[name]
        if not REPOSITORY.fullmatch(name) or not all(part.strip(".") for part in name.split("/")):
            hint = nearest(name.rpartition("/")[2], self.published)
            raise UserError(
                f"{shortened(name)}: unknown on {self.title}; give ORGANISATION/MODEL or a shipped model{hint}"
            )
        return name

    def get_json(self, client: httpx.Client, url: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the JSON object that the hub answers with, of at most ``MAX_JSON`` bytes.

        Raises:
            httpx.HTTPError: the request failed.
            ValueError: the answer is not a JSON object, or too large.
        """
        text = bytearray()
        with client.stream("GET", url, params=query) as response:
            response.raise_for_status()
            for piece in _raw_pieces(response):
                text += piece
                if len(text) > MAX_JSON:
                    raise ValueError(f"answers with over {MAX_JSON >> 20} MiB of JSON")
        answer = parse_json(bytes(text))
        if not isinstance(answer, dict):
            raise ValueError("answers without a JSON object")
        return answer

    def _receive(
        self, client: httpx.Client, listing: Listing, file: RemoteFile, start: int
    ) -> Iterator[tuple[int, bytes]]:
        url, query = self.file_request(listing, file)
        headers = {"Range": f"bytes={start}-"} if start else {}
        with client.stream("GET", url, params=query, headers=headers) as response:
            response.raise_for_status()
            resumes = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            offset = start if response.status_code == 206 and resumes else 0
            for piece in _raw_pieces(response):
                if offset + len(piece) > file.size:
                    raise ValueError(f"sends more than the {file.size:,} bytes of {file.name} that it lists")
                yield offset, piece
                offset += len(piece)

    @contextmanager
    def _connect(self, repository: str, revision: str) -> Iterator[httpx.Client]:
        """Yield a client; raise its errors as UserError and RunFailed with one line each."""
        import httpx

        address, _, timeout = self.variables
        # A compressed answer could be of any size, and has no positions to resume from.
        headers = {"User-Agent": f"mindllm/{__version__}", "Accept-Encoding": "identity", **self.headers()}
        limits = httpx.Timeout(_read_seconds(timeout), connect=CONNECT_SECONDS)
        try:
            with httpx.Client(headers=headers, timeout=limits, follow_redirects=True) as client:
                yield client
        except httpx.HTTPStatusError as error:
            if reason := self.explain(error.response, revision):
                raise UserError(f"{repository}: {self.endpoint}: {reason}") from None
            status = f"{error.response.status_code} {shortened(error.response.reason_phrase)}"
            raise RunFailed(f"{repository}: {self.endpoint} answers: {status}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = shortened(str(error).partition("\n")[0] or type(error).__name__, 200)
            advice = f"run again to continue ({address} and HTTPS_PROXY set the address and the proxy)"
            raise RunFailed(f"{repository}: {self.endpoint}: {reason}; {advice}") from None
        except (ImportError, ValueError) as error:  # an invalid proxy or token, or an invalid answer
            raise RunFailed(f"{repository}: {self.endpoint}: {shortened(str(error), 200)}") from None


def _raw_pieces(response: httpx.Response) -> Iterator[bytes]:
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise ValueError(f"compresses its answer, which was not requested ({shortened(encoding)})")
    return response.iter_raw()


def _is_transient(error: Exception) -> bool:
    """Return True if a request may succeed a little later."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return not isinstance(error, (httpx.UnsupportedProtocol, httpx.ProxyError))


def _read_seconds(variable: str) -> float:
    """Return the timeout that an environment variable sets; the default where it is not set."""
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else READ_SECONDS
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{variable}: must be a number of seconds above 0 (value {text})")
    return seconds
