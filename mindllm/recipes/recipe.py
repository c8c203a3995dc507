"""A run as choices over a base YAML: each chosen key is written with the reason for its value."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig, load_config, render_config
from mindllm.config.reading.document import Document, KeyPath, at, merge
from mindllm.config.reading.load import BASE, plain, read_document, rename, with_comments
from mindllm.config.reading.overrides import Overrides, override_document
from mindllm.config.reading.shipped import existing_or_shipped
from mindllm.config.reading.yaml_tree import single_line, write_commented, write_yaml
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.launch.layouts import HEAD
from mindllm.outside import open_file
from mindllm.terminal.tables import Table, texts

WRITTEN_BY = "# Written by: "  # first words of the YAML of a command


@dataclass(frozen=True)
class Choice:
    """The value of a dotted key and its reason, written as ``key: value  # reason``."""

    key: str
    value: Any
    reason: str

    @property
    def path(self) -> KeyPath:
        """The key as a path."""
        return tuple(self.key.split("."))


def override_keys(base: str, overrides: Overrides) -> Mapping[str, Any]:
    """Return the overrides as the tree of a YAML over ``base``, without validation.

    Other choices depend on them: the batch size decides the number of accumulation steps.
    """
    changes = override_document(overrides, read_document(existing_or_shipped(Path(base))), RunConfig)
    rename(changes)
    return changes.data


@dataclass(frozen=True)
class Recipe:
    """The choices of a run over the YAML ``base`` below ``configs/``; ``command`` is the command line."""

    command: str
    base: str
    choices: tuple[Choice, ...]

    def with_choices(self, choices: Iterable[Choice]) -> Recipe:
        """Return this recipe with more choices, which replace those of the same key."""
        known = {choice.key: choice for choice in (*self.choices, *choices)}
        return replace(self, choices=tuple(known.values()))

    def made(self, overrides: Overrides = ()) -> MadeRun:
        """Return the run with overrides, which replace choices.

        Raises:
            UserError: the run is invalid.
        """
        tree = self.tree()
        config = load_config(tree, overrides)
        document = Document(tree)
        over_base = merge(read_document(existing_or_shipped(Path(self.base))), document)
        changes = override_document(overrides, over_base, RunConfig)
        rename(changes)
        keys = merge(document, changes).data
        choices = [choice for choice in self.choices if at(keys, choice.path) == plain(choice.value)]
        config = with_comments(config, {choice.path: choice.reason for choice in choices})
        return MadeRun(config, self.command, keys, tuple(choices))

    def tree(self) -> dict[str, Any]:
        """Return the choices as the tree of a YAML."""
        tree: dict[str, Any] = {BASE: self.base}
        for choice in self.choices:
            section, keys = tree, choice.key.split(".")
            for key in keys[:-1]:
                section = section.setdefault(key, {})
            section[keys[-1]] = plain(choice.value)
        return tree


@dataclass(frozen=True)
class MadeRun:
    """A run made of choices: its configuration, and the YAML that repeats it."""

    config: RunConfig
    command: str
    tree: Mapping[str, Any]
    choices: tuple[Choice, ...]

    def yaml(self) -> str:
        """Return the YAML: the base and the differences, each choice with its reason."""
        reasons = {choice.path: choice.reason for choice in self.choices}
        first = f"{WRITTEN_BY}{single_line(self.command)}\n# The same command overwrites it: copy it to keep changes.\n"
        return first + write_commented(self.tree, reasons)

    def write(self, path: Path) -> None:
        """Write :meth:`yaml` to ``path`` atomically.

        Raises:
            UserError: the file is not writable.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(path) as file:
                file.write(self.yaml())
        except OSError as error:
            raise UserError(f"{path}: is not writable: {error.strerror}") from None

    def without(self, keys: Iterable[str]) -> MadeRun:
        """Return this run with a YAML without these top-level keys."""
        return replace(self, tree={key: value for key, value in self.tree.items() if key not in set(keys)})

    def table(self) -> Table:
        """Return the choices as a table: key, value, reason."""
        rows = [(choice.key, _shown(choice.value), choice.reason) for choice in self.choices]
        return Table("settings", texts("key", "value", "reason"), rows)


def _shown(value: Any) -> str:
    """Return a value as YAML on one line."""
    items = plain(value)
    if isinstance(items, list):
        return f"[{', '.join(map(_shown, items))}]"
    return write_yaml({"value": items}).removeprefix("value:").strip()


SPARE, BOOK = ".spare_", ".book"


def spare_path(path: Path, number: int) -> Path:
    """Return the YAML of the layout with so many nodes fewer, next to the YAML of a run."""
    return path.with_name(f"{path.stem}{SPARE}{number}{path.suffix}")


def book_path(path: Path) -> Path:
    """Return the plan book of the run at ``path``."""
    return path.with_name(f"{path.stem}{BOOK}.yaml")


def remove_spares(path: Path, written: RunConfig | None = None) -> tuple[Path, ...]:
    """Remove the plan book and spare layouts that an earlier command wrote next to ``path``, and return them.

    A restart would take the layout of the earlier run. Files stay if ``path`` already holds the run ``written``, and so do files
    that no command has written.
    """
    if written is not None and _holds(path, written):
        return ()
    return tuple(_remove_spares(path))


def removal_note(path: Path, removed: Collection[Path]) -> str:
    """Return a line about the files that :func:`remove_spares` removed; empty if there are none."""
    names = ", ".join(file.name for file in removed)
    return f"removed files of another run next to {path}: {names}" if names else ""


def _remove_spares(path: Path) -> Iterator[Path]:
    spares = sorted(path.parent.glob(f"{glob.escape(path.stem)}{SPARE}[0-9]*{path.suffix}"))
    for file_path, start in ((book_path(path), HEAD), *((spare, WRITTEN_BY) for spare in spares)):
        with suppress(OSError), open_file(file_path) as file:  # an unreadable file was not written by a command
            if file.read(len(start)) == start.encode():
                file_path.unlink()
                yield file_path


def _holds(path: Path, config: RunConfig) -> bool:
    """Return True if a YAML already holds a run."""
    try:
        return render_config(load_config(path)) == render_config(config)
    except UserError:
        return False
