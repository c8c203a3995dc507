"""Which tensors a directory of Hugging Face holds, by its index or the header of its one file; no tensor is read."""

from __future__ import annotations

import json
from pathlib import Path

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes, the most that the format's own reader takes


def weight_names(directory: Path) -> frozenset[str] | None:
    """Their names; None where there are no safetensors files, or their names cannot be read: whoever reads them says why."""
    try:
        if (directory / INDEX).is_file():
            return frozenset(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"])
        with (directory / WHOLE).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return frozenset(json.loads(file.read(length))) if length < LONGEST_HEADER else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
