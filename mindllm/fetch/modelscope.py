"""ModelScope, by the requests of its own client, which is not imported.

The client's releases share the protocol but not their Python interfaces; they read a login from a pickle, and write an identity
of the user into the home directory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mindllm.errors import RunFailed, UserError, shortened
from mindllm.fetch.hub import PUBLISHED_ON_MODELSCOPE, Hub
from mindllm.fetch.listing import Listing, RemoteFile, check_file, check_files, check_license

if TYPE_CHECKING:
    import httpx

ENDPOINT = "https://modelscope.cn"
MAX_LISTED = 3000  # files, at which the hub truncates its list


class ModelScope(Hub):
    """ModelScope, or a server with its protocol (``MODELSCOPE_ENDPOINT``)."""

    title = "ModelScope"
    default_revision = "master"
    published = PUBLISHED_ON_MODELSCOPE
    variables = ("MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN", "MODELSCOPE_DOWNLOAD_TIMEOUT")

    @property
    def endpoint(self) -> str:
        """Address of the hub: ``MODELSCOPE_ENDPOINT``, else ``MODELSCOPE_DOMAIN``, else ModelScope itself."""
        names = ("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN")
        address = next(filter(None, (os.environ.get(name, "").strip() for name in names)), ENDPOINT)
        return (address if "://" in address else f"https://{address}").rstrip("/")

    def headers(self) -> dict[str, str]:
        """Return the login: a cookie for older services of the hub, a header for newer ones."""
        token = os.environ.get("MODELSCOPE_API_TOKEN", "").strip()
        return {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}

    def read_listing(self, client: httpx.Client, repository: str, revision: str) -> Listing:
        """Request all files of a model."""
        card = self._read_data(client, repository, "", {})
        query = {"Revision": revision, "Recursive": "True"}
        entries = self._read_data(client, repository, "/repo/files", query).get("Files")
        if isinstance(entries, list):
            if len(entries) >= MAX_LISTED:
                raise UserError(f"{repository}: the hub lists {MAX_LISTED:,} files and stops there; there may be more")
            entries = [entry for entry in entries if not isinstance(entry, dict) or entry.get("Type") != "tree"]
        files = check_files(repository, entries, _read_file)
        return Listing(repository, revision, None, files, check_license(card.get("License")))

    def file_request(self, listing: Listing, file: RemoteFile) -> tuple[str, dict[str, str]]:
        """Return the address and the query of a file."""
        return self._url(listing.repository, "/repo"), {"Revision": listing.revision, "FilePath": file.name}

    def explain(self, response: httpx.Response, revision: str) -> str:
        """Return advice about a refused request; empty for a failure of the hub."""
        if response.status_code != 404:
            return super().explain(response, revision)
        if response.request.url.path.endswith("/repo/files"):
            return f"no such revision (value {shortened(revision)})"
        return (
            ""
            if "FilePath" in response.request.url.params
            else "no such model, or it is private (MODELSCOPE_API_TOKEN)"
        )

    def _url(self, repository: str, rest: str) -> str:
        return f"{self.endpoint}/api/v1/models/{quote(repository)}{rest}"

    def _read_data(self, client: httpx.Client, repository: str, rest: str, query: dict[str, str]) -> dict[str, Any]:
        """Return ``Data`` of an answer."""
        answer = self.get_json(client, self._url(repository, rest), query)
        data = answer.get("Data")
        if answer.get("Code", 200) != 200 or not isinstance(data, dict):
            message = shortened(answer.get("Message") or "no data", 200)
            raise RunFailed(f"{repository}: {self.endpoint} answers: {message}")
        return data


def _read_file(repository: str, entry: dict[str, Any]) -> RemoteFile:
    return check_file(repository, entry.get("Path"), entry.get("Size"), entry.get("Sha256"))
