"""Reads a run's YAML: base files, the file itself, overrides, schema, cross checks. And writes it back, resolved."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindllm.config.checks import check_run
from mindllm.config.dataset import IndexedDataLoader
from mindllm.config.document import Document, Problem, child, closest_origin, merge
from mindllm.config.model import ModelConfig
from mindllm.config.overrides import Overrides, override_document
from mindllm.config.pretrained import fill_from_pretrained
from mindllm.config.problems import schema_problems
from mindllm.config.renamed import rename
from mindllm.config.run import Provenance, RunConfig
from mindllm.config.shipped import shipped_or_own
from mindllm.config.yaml_tree import read_yaml, write_yaml
from mindllm.errors import UserError, nearest
from mindllm.mindformers.convert import Conversion, convert
from mindllm.mindformers.recognise import is_mindformers
from mindllm.outside import LARGEST_YAML, read_text

BASE = "base"
MOST_BASES = 20
MOST_SHOWN = 40  # mistakes of one configuration
logger = logging.getLogger(__name__)


def load_config(path: str | os.PathLike[str], overrides: Overrides = ()) -> RunConfig:
    """Reads the YAML at ``path`` over its ``base``, changed by ``overrides``; a ``UserError`` names every mistake.

    ``overrides`` are options as on a command line (``--a.b.c=value``, ``--a.b.c value``, ``--flag``) or a mapping of
    dotted keys to values. A path below ``configs/`` that is not there is looked for among those that come with mindllm.
    """
    source = shipped_or_own(Path(path))
    document = read_file(source)
    if not is_mindformers(document):
        return _build(_with_base(document, source, ()), overrides, source)
    conversion = convert(document, overrides)
    config = build_config(conversion, source)
    numbers = ", ".join(f"{count} {outcome.value}" for outcome, count in conversion.counts().items() if count)
    message = "%s is a YAML of MindFormers: of its keys %s; every one: python -m toolkit.convert_config %s"
    logger.warning(message, source, numbers, source)
    for warning in conversion.warnings:
        logger.warning("%s: %s", source, warning)
    return config


def build_config(conversion: Conversion, source: Path) -> RunConfig:
    """Returns what a YAML of MindFormers was converted to; a ``UserError`` names all that is refused."""
    _refuse(conversion.document.problems)
    return _build(conversion.document, conversion.overrides, source)


def read_file(path: Path) -> Document:
    """Reads one YAML as it is, without its base; raises UserError for a file that is none."""
    return read_yaml(_text(path), str(path))


def override_config(config: RunConfig, overrides: Overrides) -> RunConfig:
    """Returns ``config`` with some keys changed; what follows from them (default widths, ...) is worked out again."""
    document = Document(plain(config.given()), dict(config._provenance.origins))
    return _build(document, overrides, config.source)


def with_model(config: RunConfig, model: ModelConfig) -> RunConfig:
    """Returns ``config`` with this model: another tuning; or another network, which no directory it names has then."""
    before, after = config.model.config.model_dump(), model.model_dump()
    changed = {key: value for key, value in after.items() if value != before[key]}
    nowhere = dict.fromkeys(("load_checkpoint", "load_adapter", "adapter_id", "pretrained_model_dir"), "")
    of_model = {f"model.model_config.{key}": value for key, value in changed.items()}
    return override_config(config, of_model if {*changed} <= {"pet_config"} else {**nowhere, **of_model})


def render_config(config: RunConfig) -> str:
    """Returns the resolved YAML, every key with its value; loading it gives an equal configuration."""
    return write_yaml(plain(config.model_dump(by_alias=True)))


def _build(document: Document, overrides: Overrides, source: Path | None) -> RunConfig:
    changes = override_document(overrides, document, RunConfig)
    rename(changes)
    document = merge(document, changes)
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
        more = [f"and {len(lines) - MOST_SHOWN:,} more mistakes"] if len(lines) > MOST_SHOWN else []
        raise UserError("\n".join([*lines[:MOST_SHOWN], *more]))


def read_document(path: Path) -> Document:
    """Reads one YAML over its base, as a tree that nothing has checked yet."""
    return _with_base(read_file(path), path, ())


def _with_base(document: Document, path: Path, readers: tuple[Path, ...]) -> Document:
    if is_mindformers(document):
        return convert(document).document
    rename(document)
    if BASE not in document.data:
        return document
    base = document.data.pop(BASE)
    origin = closest_origin(document.origins, (BASE,), path)
    if not isinstance(base, str):
        raise UserError(f"{origin}: {BASE}: must be the path of a YAML file, relative to this one (value {base})")
    base_path = Path(os.path.normpath(path.parent / base))
    if os.path.realpath(base_path) in map(os.path.realpath, (*readers, path)):
        raise UserError(f"{origin}: {BASE}: {base} is based on this file in turn")
    if len(readers) >= MOST_BASES:
        raise UserError(f"{origin}: {BASE}: this is base number {len(readers) + 1}; at most {MOST_BASES} are read")
    try:
        found = read_file(base_path)
    except UserError as error:
        raise UserError(f"{origin}: {BASE}: {error}") from None
    return merge(_with_type(_with_base(found, base_path, (*readers, path))), document)


def _with_type(base: Document) -> Document:
    """``base`` with the type its data loader has by default, so that another type over it starts the section afresh."""
    loader = child(base.data.get("train_dataset"), "data_loader")
    if isinstance(loader, dict):
        loader.setdefault("type", IndexedDataLoader.model_fields["type"].default)
    return base


def _text(path: Path) -> str:
    try:
        return read_text(path, LARGEST_YAML)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{_similar(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _similar(path: Path) -> str:
    hint = nearest(path.name, (file.name for file in path.parent.glob("*.yaml"))) if path.parent.is_dir() else ""
    return hint if "did you mean" in hint else ""


def plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
