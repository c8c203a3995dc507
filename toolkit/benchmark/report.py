"""Tables of a benchmark as a Markdown page that says how it was made and on what."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mindllm.files import atomic_open

LIBRARIES = ("mindspore", "torch", "transformers", "numpy")
Tables = Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]  # (title, columns, rows) of each


def write_markdown(path: Path, title: str, description: str, command: str, tables: Tables) -> None:
    """Writes a page with ``tables``, the ``command`` that made them and the machine they were made on."""
    parts = [f"# {title}\n\n{description.strip()}\n\nMade by\n\n```bash\n{command}\n```\n\n{machine()}\n"]
    for caption, columns, rows in tables:
        lines = [_line(columns), _line(["---"] * len(columns)), *map(_line, rows)]
        parts.append(f"\n## {caption}\n\n" + "\n".join(lines) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_open(path) as file:
        file.write("".join(parts))


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
