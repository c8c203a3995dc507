"""Reads a run's YAML: base files, the file itself, overrides, schema, cross checks. And writes it back, resolved."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindllm.config.checks import check_run
from mindllm.config.dataset import IndexedDataLoader
from mindllm.config.document import Document, Problem, child, closest_origin, merge
from mindllm.config.overrides import Overrides, override_document
from mindllm.config.pretrained import fill_from_pretrained
from mindllm.config.problems import schema_problems
from mindllm.config.renamed import rename
from mindllm.config.run import Provenance, RunConfig
from mindllm.config.yaml_tree import read_yaml, write_yaml
from mindllm.errors import UserError, nearest

BASE = "base"


def load_config(path: str | os.PathLike[str], overrides: Overrides = ()) -> RunConfig:
    """Reads the YAML at ``path`` over its ``base``, changed by ``overrides``; a ``UserError`` names every mistake.

    ``overrides`` are options as on a command line (``--a.b.c=value``, ``--a.b.c value``, ``--flag``) or a mapping of
    dotted keys to values.
    """
    source = Path(path)
    return _build(_read_with_base(source, ()), overrides, source)


def override_config(config: RunConfig, overrides: Overrides) -> RunConfig:
    """Returns ``config`` with some keys changed; what follows from them (default widths, ...) is worked out again."""
    document = Document(_plain(config.given()), dict(config._provenance.origins))
    return _build(document, overrides, config.source)


def render_config(config: RunConfig) -> str:
    """Returns the resolved YAML, every key with its value; loading it gives an equal configuration."""
    return write_yaml(_plain(config.model_dump(by_alias=True)))


def _build(document: Document, overrides: Overrides, source: Path | None) -> RunConfig:
    changes = override_document(overrides, document, RunConfig)
    rename(changes)
    document = merge(_with_type(document), changes)
    fill_from_pretrained(document)
    try:
        config = RunConfig.model_validate(document.data)
    except ValidationError as error:
        _refuse(document.problems + schema_problems(error, document, RunConfig, source))
    config._provenance = Provenance(source, document.origins)
    _refuse(document.problems + [config.problem(path, message) for path, message in check_run(config)])
    return config


def _refuse(problems: Iterable[Problem]) -> None:
    lines = list(dict.fromkeys(map(str, problems)))
    if lines:
        raise UserError("\n".join(lines))


def _read_with_base(path: Path, readers: tuple[Path, ...]) -> Document:
    document = read_yaml(_text(path), str(path))
    rename(document)
    if BASE not in document.data:
        return document
    base = document.data.pop(BASE)
    origin = closest_origin(document.origins, (BASE,), path)
    if not isinstance(base, str):
        raise UserError(f"{origin}: {BASE}: must be the path of a YAML file, relative to this one (value {base})")
    base_path = Path(os.path.normpath(path.parent / base))
    if base_path.resolve() in [reader.resolve() for reader in (*readers, path)]:
        raise UserError(f"{origin}: {BASE}: {base} is based on this file in turn")
    if not base_path.is_file():
        raise UserError(f"{origin}: {BASE}: no such file: {base_path}{_similar(base_path)}")
    return merge(_with_type(_read_with_base(base_path, (*readers, path))), document)


def _with_type(base: Document) -> Document:
    """``base`` with the type its data loader has by default, so that another type over it starts the section afresh."""
    loader = child(base.data.get("train_dataset"), "data_loader")
    if isinstance(loader, dict):
        loader.setdefault("type", IndexedDataLoader.model_fields["type"].default)
    return base


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{_similar(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None


def _similar(path: Path) -> str:
    hint = nearest(path.name, (file.name for file in path.parent.glob("*.yaml"))) if path.parent.is_dir() else ""
    return hint if "did you mean" in hint else ""


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
