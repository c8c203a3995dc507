"""Tables of a benchmark as a Markdown page that says how it was made and on what."""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_file
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.outside import parse_json

LIBRARIES = ("mindspore", "torch", "transformers", "numpy")
Tables = Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]  # (title, columns, rows) of each


def data_options(prog: str, description: str | None, examples: str, arguments: Sequence[str] | None) -> Namespace:
    """Read ``--data``, a directory of published tables, and ``--markdown``, the page to write.

    Raises:
        UserError: there is no such directory.
    """
    parser = CommandParser(prog=prog, description=description, epilog=examples)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the published tables, as CSV")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="page to write")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        raise UserError(f"--data {options.data}: is not a directory")
    return options


def write_markdown(
    path: Path, title: str, description: str, command: str, tables: Tables, kept_from: str | None = None
) -> None:
    """Writes a page with ``tables``, the ``command`` that made them and the machine they were made on.

    What an author wrote below them stays: all from the heading ``kept_from`` on.
    """
    written_by_hand = _from_heading(path, kept_from) if kept_from else ""
    parts = [f"# {title}\n\n{description.strip()}\n\nMade by\n\n```bash\n{command}\n```\n\n{machine()}\n"]
    for caption, columns, rows in tables:
        lines = [_line(columns), _line(["---"] * len(columns)), *map(_line, rows)]
        parts.append(f"\n## {caption}\n\n" + "\n".join(lines) + "\n")
    parts.append(written_by_hand)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_open(path) as file:
        file.write("".join(parts))


def _from_heading(path: Path, heading: str) -> str:
    """A page from ``## heading`` on; empty where it has none."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    at = text.find(f"\n## {heading}\n")
    return text[at:] if at >= 0 else ""


def kept_rows(path: Path | None, key: str, again: Collection[str]) -> list[dict[str, Any]]:
    """What former sittings measured (JSON), without the rows whose ``key`` is measured again."""
    if path is None or not path.is_file():
        return []
    return [row for row in parse_json(path.read_bytes()) if row[key] not in again]


def keep_rows(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes them for :func:`kept_rows`."""
    if path is not None:
        with atomic_open(path) as file:
            json.dump(rows, file, indent=1)
            file.write("\n")


def machine() -> str:
    """Processor, cores, Python and the libraries a benchmark compares, in a sentence."""
    libraries = ", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name)))
    processor = f"{_processor()}, {os.cpu_count()} cores, {platform.system()}"
    return f"on {date.today()}: {processor}; Python {platform.python_version()}, {libraries}."


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
