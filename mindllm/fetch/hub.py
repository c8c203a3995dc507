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
from dataclasses import dataclass

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
        """Return advice about a refused request; empty for a failure of the hub."""
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
    """Return the timeout in an environment variable, or the default."""
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else READ_SECONDS
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{variable}: must be a number of seconds above 0 (value {text})")
    return seconds


PUBLISHED = {
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "codellama_34b": "codellama/CodeLlama-34b-hf",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "mixtral_8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen1_5_7b": "Qwen/Qwen1.5-7B",
    "qwen1_5_14b": "Qwen/Qwen1.5-14B",
    "qwen2_5_0_5b": "Qwen/Qwen2.5-0.5B",
    "qwen2_5_1_5b": "Qwen/Qwen2.5-1.5B",
    "qwen2_5_3b": "Qwen/Qwen2.5-3B",
    "qwen2_5_7b": "Qwen/Qwen2.5-7B",
    "qwen2_5_14b": "Qwen/Qwen2.5-14B",
    "qwen2_5_32b": "Qwen/Qwen2.5-32B",
    "qwen2_5_72b": "Qwen/Qwen2.5-72B",
    "qwen2_moe_57b": "Qwen/Qwen2-57B-A14B",
    "qwen3_0_6b": "Qwen/Qwen3-0.6B",
    "qwen3_1_7b": "Qwen/Qwen3-1.7B",
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_14b": "Qwen/Qwen3-14B",
    "qwen3_32b": "Qwen/Qwen3-32B",
    "qwen3_moe_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3_moe_235b_a22b": "Qwen/Qwen3-235B-A22B",
    "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b",
    "gemma2_27b": "google/gemma-2-27b",
    "gemma3_1b": "google/gemma-3-1b-pt",
    "yi_6b": "01-ai/Yi-6B",
    "yi_34b": "01-ai/Yi-34B",
    "gpt2": "openai-community/gpt2",
    "gpt2_medium": "openai-community/gpt2-medium",
    "gpt2_large": "openai-community/gpt2-large",
    "gpt2_xl": "openai-community/gpt2-xl",
    "bloom_7b1": "bigscience/bloom-7b1",
    "deepseek_v2_lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek_v2_236b": "deepseek-ai/DeepSeek-V2",
}

KEEPS_ITS_NAMES = ("Qwen/", "deepseek-ai/")
"""Organisations that publish on ModelScope under the names they have on Hugging Face's hub."""
PUBLISHED_ON_MODELSCOPE = {
    name: repository for name, repository in PUBLISHED.items() if repository.startswith(KEEPS_ITS_NAMES)
}


HUBS = {  # by the last two parts of the host's name
    "huggingface.co": "huggingface",
    "hf.co": "huggingface",
    "hf-mirror.com": "huggingface",
    "modelscope.cn": "modelscope",
    "modelscope.ai": "modelscope",
}
OF_FILES = ("tree", "blob", "resolve", "file", "files", "raw", "commit")  # between name and revision
OTHERS = {"datasets": "a data set", "spaces": "a program"}
USUAL = ("main", "master")


@dataclass(frozen=True)
class Address:
    """A model on a hub; ``revision`` is empty for the usual one."""

    hub: str
    repository: str
    revision: str = ""


def read_address(text: str) -> Address | None:
    """Return the model at an address, with or without ``https://``; None if it is not an address of a hub.

    Raises:
        UserError: the address is another page of the hub.
    """
    place = re.sub(r"^\w+://", "", text)
    host, _, path = place.partition("/")
    name = ".".join(host.lower().split(":")[0].split(".")[-2:])
    if name not in HUBS:
        return None
    parts = [part for part in re.split(r"[?#]", path)[0].split("/") if part]
    if parts[:1] and parts[0] in OTHERS:
        raise UserError(f"{text}: is the page of {OTHERS[parts[0]]}, not of a model; give ORGANISATION/MODEL")
    if HUBS[name] == "modelscope" and parts[:1] == ["models"]:
        parts = parts[1:]
    if len(parts) < 2:
        raise UserError(f"{text}: is the page of no model; give ORGANISATION/MODEL")
    behind = [part for part in parts[2:] if part != "view"]  # ModelScope's pages of files
    revision = behind[1] if len(behind) > 1 and behind[0] in OF_FILES and behind[1] not in USUAL else ""
    return Address(HUBS[name], "/".join(parts[:2]), revision)
