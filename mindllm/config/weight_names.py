"""Which tensors a directory of Hugging Face holds, by its index or the header of its one file; no tensor is read."""

from __future__ import annotations

import json
from pathlib import Path

WEIGHTS_FILE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes, the most that the format's own reader takes


def index_of(file: str) -> str:
    """The name of the index that lists the shards of ``file``."""
    return f"{file}.index.json"


INDEX_FILE = index_of(WEIGHTS_FILE)


def weight_names(directory: Path) -> frozenset[str] | None:
    """Their names; None where there are no safetensors files, or their names cannot be read: whoever reads them says why."""
    try:
        if (directory / INDEX_FILE).is_file():
            return frozenset(json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"])
        with (directory / WEIGHTS_FILE).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return frozenset(json.loads(file.read(length))) if length < LONGEST_HEADER else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
