"""A hub: where models are published. What ``mindllm fetch`` asks of one; each implementation asks it in its own protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, ClassVar

from mindllm.errors import UserError
from mindllm.fetch.choice import RemoteFile, chosen

MOST_FILES = 10_000


@dataclass(frozen=True)
class Listing:
    """What a hub says of a model at one revision.

    Attributes:
        revision: what files are asked for by: a commit where the hub names it, else a branch or tag.
        commit: the commit of ``revision``; null where the hub does not say.
    """

    hub: Hub
    repository: str
    revision: str
    commit: str | None
    files: tuple[RemoteFile, ...]
    licence: str | None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def unchecked(self) -> list[str]:
        """Names of files of which the hub gives no checksum."""
        return [file.name for file in self.files if not file.sha256 and not file.blob]


class Hub(ABC):
    """One hub and its protocol. The environment says where it is, who asks, and through which proxy.

    Attributes:
        title: its name in texts.
        default_revision: the branch that is fetched where no revision is given.
        published: where it has the weights of shipped models.
    """

    title: ClassVar[str]
    default_revision: ClassVar[str]
    published: ClassVar[Mapping[str, str]]

    @abstractmethod
    def describe(self, repository: str, revision: str) -> Listing:
        """Return all files of a model.

        Raises:
            UserError: there is no such model or revision, or it wants a login.
            RunFailed: the hub cannot be reached, or answers with an error.
        """

    @abstractmethod
    def transfer(self, listing: Listing, file: RemoteFile, content: IO[bytes]) -> None:
        """Append to ``content`` the bytes of a file that it does not have; all bytes where the hub does not continue.

        Raises:
            UserError: the model wants a login.
            RunFailed: the hub cannot be reached, or answers with an error.
        """

    def list_files(self, repository: str, revision: str | None = None, include: Sequence[str] = ()) -> Listing:
        """Ask what files of a model there are to fetch.

        Raises:
            UserError: there is no such model or revision, it wants a login, or it has no weights that are taken.
            RunFailed: the hub cannot be reached, or answers with an error.
        """
        listing = self.describe(repository, self.default_revision if revision is None else revision)
        if len(listing.files) > MOST_FILES:
            raise UserError(f"{repository}: lists {len(listing.files):,} files; no model has over {MOST_FILES:,}")
        return replace(listing, files=tuple(chosen(repository, listing.files, include)))

    def repository(self, name: str) -> str:
        """Return the hub's name of a model: its own, or that of a shipped one whose place is known.

        Raises:
            UserError: it is neither.
        """
        if name in self.published:
            return self.published[name]
        if name.count("/") != 1 or not all(part.strip(".") for part in name.split("/")):
            raise UserError(
                f"{name}: neither the name of a model on {self.title} (ORGANISATION/MODEL) nor a shipped model whose place "
                f"there is known ({', '.join(sorted(self.published)[:5])}, ...; mindllm models lists the shipped ones)"
            )
        return name
