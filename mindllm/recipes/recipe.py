"""A run as choices over a base: every key that was chosen for a person stands in the YAML with the reason for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig, load_config
from mindllm.config.reading.document import Document, KeyPath, at, merge
from mindllm.config.reading.load import BASE, plain, read_document, rename, with_comments
from mindllm.config.reading.overrides import Overrides, override_document
from mindllm.config.reading.shipped import existing_or_shipped
from mindllm.config.reading.yaml_tree import single_line, write_commented, write_yaml
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.terminal.tables import Table, texts

WRITTEN_BY = "# Written by: "  # how the YAML of a command begins


@dataclass(frozen=True)
class Choice:
    """The value of a dotted key, and why it is that: shown as ``key: value  # reason``."""

    key: str
    value: Any
    reason: str

    @property
    def path(self) -> KeyPath:
        """The key as a path."""
        return tuple(self.key.split("."))


def asked_keys(base: str, overrides: Overrides) -> Mapping[str, Any]:
    """Return what a person asked for besides, as the tree of a YAML over ``base``; what is wrong in it is told by loading.

    Choices are made around it: a batch that is asked for decides how often gradients are added up.
    """
    changes = override_document(overrides, read_document(existing_or_shipped(Path(base))), RunConfig)
    rename(changes)
    return changes.data


@dataclass(frozen=True)
class Recipe:
    """The choices of a run, over the YAML ``base`` below ``configs/``; ``command`` is what the person typed."""

    command: str
    base: str
    choices: tuple[Choice, ...]

    def with_choices(self, choices: Iterable[Choice]) -> Recipe:
        """Return this recipe with more choices; one of a key that is there replaces it."""
        known = {choice.key: choice for choice in (*self.choices, *choices)}
        return replace(self, choices=tuple(known.values()))

    def made(self, overrides: Overrides = ()) -> MadeRun:
        """Return the run with what the person asked for besides, which goes before every choice.

        Raises:
            UserError: the run is wrong, by an option or by a choice; named as in a YAML.
        """
        tree = self.tree()
        config = load_config(tree, overrides)
        document = Document(tree)
        over_base = merge(read_document(existing_or_shipped(Path(self.base))), document)
        changes = override_document(overrides, over_base, RunConfig)
        rename(changes)
        asked = merge(document, changes).data
        kept = [choice for choice in self.choices if at(asked, choice.path) == plain(choice.value)]
        config = with_comments(config, {choice.path: choice.reason for choice in kept})
        return MadeRun(config, self.command, asked, tuple(kept))

    def tree(self) -> dict[str, Any]:
        """Return the choices as a YAML has them."""
        tree: dict[str, Any] = {BASE: self.base}
        for choice in self.choices:
            section, keys = tree, choice.key.split(".")
            for key in keys[:-1]:
                section = section.setdefault(key, {})
            section[keys[-1]] = plain(choice.value)
        return tree


@dataclass(frozen=True)
class MadeRun:
    """A run that was made of choices: its configuration, and the YAML that repeats it."""

    config: RunConfig
    command: str
    tree: Mapping[str, Any]
    choices: tuple[Choice, ...]

    def yaml(self) -> str:
        """Return the YAML: a base and what differs, each choice with its reason behind it."""
        reasons = {choice.path: choice.reason for choice in self.choices}
        first = (
            f"{WRITTEN_BY}{single_line(self.command)}\n# The same command writes it anew: copy it to keep changes.\n"
        )
        return first + write_commented(self.tree, reasons)

    def write(self, path: Path) -> None:
        """Write :meth:`yaml` to ``path``, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(path) as file:
                file.write(self.yaml())
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None

    def without(self, keys: Iterable[str]) -> MadeRun:
        """Return it with a YAML that leaves out these keys of the top level."""
        left_out = set(keys)
        return replace(self, tree={key: value for key, value in self.tree.items() if key not in left_out})

    def table(self) -> Table:
        """Return the choices as a table: key, value, reason."""
        rows = [(choice.key, _shown(choice.value), choice.reason) for choice in self.choices]
        return Table("chosen", texts("key", "value", "why"), rows)


def _shown(value: Any) -> str:
    """Return a value as a cell of the table: YAML on one line."""
    items = plain(value)
    if isinstance(items, list):
        return f"[{', '.join(map(_shown, items))}]"
    return write_yaml({"value": items}).removeprefix("value:").strip()
