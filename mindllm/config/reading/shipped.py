"""The configurations in ``configs/``: models by family and size, with the YAMLs of each. An installed package has a copy.

Tests load every shipped file (``tests/config/test_config_shipped.py``), so the list of models parses them with the C library and
merges them over their bases without recording places and without cross checks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from mindllm.config.model import ModelConfig
from mindllm.config.parallel import ParallelConfig
from mindllm.config.reading.yaml_tree import PlainLoader
from mindllm.outside import LARGEST_YAML, read_bytes, read_text
from mindllm.sources import PACKAGE

NAME = "configs"


def shipped_configs() -> Path:
    """Return the directory of the shipped configurations."""
    installed = PACKAGE / NAME
    return installed if installed.is_dir() else PACKAGE.parent / NAME


def existing_or_shipped(path: Path) -> Path:
    """Return ``path`` if it exists or is not below ``configs/``; else the shipped file of that name."""
    return path if path.exists() else shipped_file(path) or path


def shipped_file(path: Path) -> Path | None:
    """Return the shipped file for a relative path below ``configs/``, regardless of the working directory; None if there is
    none.
    """
    shipped = shipped_configs().joinpath(*path.parts[1:])
    return shipped if path.parts[:1] == (NAME,) and shipped.exists() else None


VARIANT = re.compile(r"_(\d+p|lora|dpo)$")
"""Ends of a file's name that say how the model is trained, not which it is."""
PROOFS = ("proven_configurations.md", "experts.md", "proving.md")
"""Pages of ``docs/`` with a table whose rows begin with a YAML and say what was found out of it."""


class FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The parser in C, which reads values as :class:`PlainLoader` does."""

    yaml_implicit_resolvers = PlainLoader.yaml_implicit_resolvers


@dataclass(frozen=True)
class ShippedRun:
    """A YAML of ``configs/``.

    Attributes:
        file: its path from ``configs/`` on.
        docs: pages with a row about it; None where the pages are not here, as in an installed package.
    """

    file: str
    run_mode: str
    devices: int
    seq_length: int
    docs: tuple[str, ...] | None


@dataclass(frozen=True)
class ShippedModel:
    """A model, and the YAMLs that train or evaluate it; ``parameters`` are those of the whole model, ``dtype`` computes it."""

    name: str
    family: str
    parameters: int
    context: int
    dtype: str
    runs: tuple[ShippedRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def shipped_models() -> list[ShippedModel]:
    """Return the models by family, small ones first."""
    root, proofs = shipped_configs(), _rows_of_docs()
    entries_by_model: dict[tuple[str, str], list[tuple[ShippedRun, ModelConfig]]] = {}
    for path in sorted(root.rglob("*.yaml")):
        family = path.parent.relative_to(root).as_posix()
        if family == "base":
            continue
        values = _read(path)
        file = f"{NAME}/{path.relative_to(root).as_posix()}"
        model = _model(json.dumps(values["model"]["model_config"], sort_keys=True))
        docs = None if proofs is None else tuple(page for page, files in proofs.items() if file in files)
        devices = ParallelConfig.model_validate(values.get("parallel_config", {})).device_num
        run = ShippedRun(file, values["run_mode"], devices, model.seq_length, docs)
        entries_by_model.setdefault((family, VARIANT.sub("", path.stem.partition("_")[2])), []).append((run, model))
    models = [_of(name, family, entries) for (family, name), entries in entries_by_model.items()]
    return sorted(models, key=lambda model: (model.family, model.parameters, model.name))


def _of(name: str, family: str, entries: list[tuple[ShippedRun, ModelConfig]]) -> ShippedModel:
    model = entries[0][1]
    context = model.max_position_embedding or model.seq_length
    runs = tuple(sorted((run for run, _ in entries), key=lambda run: (run.run_mode != "train", run.devices, run.file)))
    return ShippedModel(name, family, model.base.parameter_count(), context, model.compute_dtype, runs)


@lru_cache(maxsize=256)
def _read(path: Path) -> dict[str, Any]:
    """Return the tree of a file merged over its base."""
    values = yaml.load(read_bytes(path, LARGEST_YAML), FastLoader)
    base = values.pop("base", None)
    return values if base is None else _over(_read(Path(os.path.normpath(path.parent / base))), values)


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _over(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in values.items()
    }
    return {**base, **both}


@lru_cache(maxsize=256)
def _model(values: str) -> ModelConfig:
    return ModelConfig.model_validate(json.loads(values))


def _rows_of_docs() -> dict[str, set[str]] | None:
    directory = PACKAGE.parent / "docs"
    if not directory.is_dir():
        return None
    return {page: set(_first_cells(directory / page)) for page in PROOFS if (directory / page).is_file()}


def _first_cells(page: Path) -> Iterator[str]:
    for line in read_text(page).splitlines():
        if match := re.match(r"\| `(configs/[^`]+\.yaml)`", line):
            yield match[1]
