"""Names of the tensors in a directory of Hugging Face, from the header of its one file or its index; no tensor is read."""

from __future__ import annotations

from pathlib import Path

from mindllm.outside import open_file, parse_json, read_json

WEIGHTS_FILE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes, the most that the format's own reader takes


def index_of(file: str) -> str:
    """The name of the index that lists the shards of ``file``."""
    return f"{file}.index.json"


INDEX_FILE = index_of(WEIGHTS_FILE)


def weight_names(directory: Path) -> frozenset[str] | None:
    """Their names; None where there are no safetensors files, or their names cannot be read: whoever reads them says why."""
    try:
        if not (directory / WEIGHTS_FILE).is_file() and (directory / INDEX_FILE).is_file():
            return frozenset(read_json(directory / INDEX_FILE)["weight_map"])
        with open_file(directory / WEIGHTS_FILE) as file:
            length = int.from_bytes(file.read(8), "little")
            return frozenset(parse_json(file.read(length))) if length < LONGEST_HEADER else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
