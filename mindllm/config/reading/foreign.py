"""Readers for the YAMLs of other programs. Packages register by name and are imported when a YAML looks like one of theirs."""

from __future__ import annotations

from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from mindllm.arguments import Overrides
    from mindllm.config.reading.document import Document
    from mindllm.errors import KeyPath

FOREIGN_KEY_COUNT = 3  # keys that only another program has: one or two are a mistake in a YAML of mindllm
READERS: list[str] = []
"""Names of modules that implement :class:`ForeignReader`."""


class ForeignRun(Protocol):
    """A run translated from the YAML of another program."""

    @property
    def document(self) -> Document:
        """The keys of mindllm, with the problems of keys that were refused."""

    @property
    def overrides(self) -> Overrides:
        """Overrides that are still to be applied to the document."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines to log."""

    @property
    def has_ignored_keys(self) -> bool:
        """Whether unknown keys were ignored."""

    def source_values(self) -> dict[str, Any]:
        """Return the keys of the source with their values."""

    def summary(self, name: object) -> str:
        """Return a line about what became of the keys of the file ``name``."""


class ForeignReader(Protocol):
    """What a module registered in :data:`READERS` implements."""

    def recognizes(self, document: Document) -> bool:
        """Return True if the YAML was written for this program."""

    def convert(self, document: Document, overrides: Overrides) -> ForeignRun:
        """Translate a YAML into a run of mindllm."""

    def replacement(self, path: KeyPath) -> str:
        """Return what to write in a YAML of mindllm instead of a key of this program; empty for other keys."""

    def section_keys(self, path: KeyPath) -> dict[str, str]:
        """Return the keys that this program has in a section, each with what to write instead."""


def registered_readers() -> list[ForeignReader]:
    """Import and return all readers."""
    return [cast(ForeignReader, import_module(name)) for name in READERS]


def reader_for(document: Document) -> ForeignReader | None:
    """Return the reader of the program that a YAML was written for; None for a YAML of mindllm."""
    from mindllm.config.reading.document import leaves
    from mindllm.config.reading.schema import has_key
    from mindllm.config.run import RunConfig

    if "base" in document.data:
        return None
    # readers are imported only for a YAML that the schema of mindllm does not explain
    foreign = (path for path, _ in leaves(document.data) if not has_key(RunConfig, path))
    if len(list(islice(foreign, FOREIGN_KEY_COUNT))) < FOREIGN_KEY_COUNT:
        return None
    return next((reader for reader in registered_readers() if reader.recognizes(document)), None)


def foreign_advice(path: KeyPath) -> str:
    """Return what to write instead of a key of another program; empty for keys that no program has."""
    return next(filter(None, (reader.replacement(path) for reader in registered_readers())), "")
