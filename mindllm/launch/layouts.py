"""The plan book of a run as a file: which of its YAMLs is for how many devices, and what a job of so many starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.launch.script import config_word
from mindllm.outside import read_text

HEAD = """# Layouts of one run, by devices: files beside this one.
# All have one global batch, so each goes on from a checkpoint of another.
"""
LARGEST = 1 << 16  # bytes; a layout takes about 30
KEYS = ("node_devices", "global_batch", "layouts")


@dataclass(frozen=True)
class LayoutBook:
    """The layouts of one run.

    Attributes:
        path: the file of the book.
        node_devices: devices of a node, by which layouts differ.
        global_batch: sequences of a step, in all layouts.
        layouts: the YAML for each number of devices.
    """

    path: Path
    node_devices: int
    global_batch: int
    layouts: Mapping[int, Path]

    def write(self) -> None:
        """Write the file; layouts are named by their files, which lie beside it.

        Raises:
            UserError: it cannot be written.
        """
        import yaml  # half of the time that help may take

        files = {devices: layout.name for devices, layout in self.layouts.items()}
        tree = {"node_devices": self.node_devices, "global_batch": self.global_batch, "layouts": files}
        try:
            with atomic_open(self.path) as file:
                file.write(HEAD + yaml.safe_dump(tree, sort_keys=False))
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None

    def fitting(self, devices: int, of_a_node: int = 1) -> int | None:
        """Return the devices of the largest layout of at most so many, in whole nodes; None: there is none."""
        return max((count for count in self.layouts if count <= devices and count % of_a_node == 0), default=None)

    def command(self, words: Sequence[str], devices: int) -> list[str]:
        """Return ``words``, which run a layout of the book, with the layout for ``devices`` in its place.

        Raises:
            UserError: they run none of the book's layouts.
        """
        index, before, said = config_word(words) or (0, "", "")
        known = {layout.resolve() for layout in self.layouts.values()}
        if not said or Path(said).resolve() not in known:
            names = ", ".join(str(layout) for layout in self.layouts.values())
            raise UserError(f"--book {self.path}: the run is {said or words[0]}, which is none of its layouts: {names}")
        return [*words[:index], before + str(self.layouts[devices]), *words[index + 1 :]]


def read_book(path: Path) -> LayoutBook:
    """Return the book in a file.

    Raises:
        UserError: it cannot be read, or is no book.
    """
    import yaml

    try:
        tree = yaml.safe_load(read_text(path, LARGEST))
    except OSError as error:
        raise UserError(f"--book {path}: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"--book {path}: no YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(tree, dict) or sorted(map(str, tree)) != sorted(KEYS):
        raise UserError(
            f"--book {path}: no plan book, which has {', '.join(KEYS)}; mindllm configure --spares N writes one"
        )
    layouts = tree["layouts"]
    if not isinstance(layouts, dict) or not layouts:
        raise UserError(f"--book {path}: layouts: name the YAML for each number of devices, as in 8: run.yaml")
    for key in KEYS[:2]:
        _count(path, key, tree[key])
    files = {_count(path, "layouts", devices): path.parent / _name(path, file) for devices, file in layouts.items()}
    return LayoutBook(path, tree["node_devices"], tree["global_batch"], files)


def _count(path: Path, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise UserError(f"--book {path}: {key}: {_said(value)} is no whole number from 1 on")
    return value


def _name(path: Path, value: Any) -> str:
    if not isinstance(value, str) or Path(value).name != value or not value.isprintable():
        raise UserError(f"--book {path}: layouts: {_said(value)} is no file beside the book; write its name alone")
    return value


def _said(value: Any) -> str:
    """A value as it is said in an error; of a list or mapping, which may be endless, its kind alone."""
    return f"{value!r:.80}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
