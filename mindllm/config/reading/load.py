"""Loading a run's YAML: base files, the file, overrides, schema, cross checks; and writing it back, resolved.

Keys of Hugging Face's ``config.json`` are accepted as synonyms.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindllm.config.checks.all import check_limits, check_run, check_unused
from mindllm.config.dataset import IndexedDataLoader
from mindllm.config.model import ModelConfig
from mindllm.config.reading.document import (
    Document,
    KeyPath,
    Origin,
    Problem,
    at,
    child,
    closest_origin,
    dotted,
    merge,
    remove,
    without_related,
)
from mindllm.config.reading.foreign import ForeignRun, reader_for
from mindllm.config.reading.overrides import Overrides, ignores_unknown, override_document
from mindllm.config.reading.pretrained import drop_missing_model_keys, fill_from_pretrained
from mindllm.config.reading.problems import intended_path, null_texts, schema_problems, unknown_paths
from mindllm.config.reading.shipped import NAME, existing_or_shipped, shipped_configs, shipped_file
from mindllm.config.reading.yaml_tree import read_yaml, unusable_value, write_commented, write_yaml
from mindllm.config.run import Provenance, RunConfig
from mindllm.errors import MOST_SHOWN, UserError, nearest
from mindllm.families import with_file_names
from mindllm.families.hugging_face import is_hugging_face
from mindllm.outside import LARGEST_YAML, TOO_DEEP, is_deeper, read_text
from mindllm.shorthands import IGNORE_UNKNOWN_KEYS

# Section -> key of Hugging Face -> key of mindllm.
SYNONYMS: dict[KeyPath, dict[str, str]] = {
    ("model", "model_config"): {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "n_kv_heads",
        "rope_theta": "theta",
        "max_position_embeddings": "max_position_embedding",
    },
    ("model", "model_config", "rope_scaling"): {"rope_type": "type"},
}

logger = logging.getLogger(__name__)
BASE = "base"
HUGGING_FACE_BASE = "base/pretrain.yaml"  # below configs/
FINETUNING_RATE = 1e-5  # of a Hugging Face directory, as the fine-tuning runs below configs/ have it
IN_MEMORY = "the dictionary"  # where errors of one stand
MOST_BASES = 20
MOST_NAMED = 8  # files of a directory
RESOLVED = "config.yaml"  # in the directory of a run: all keys it ran with
STARTS = "mindllm configure and mindllm finetune write such a YAML"


Source = str | os.PathLike[str] | Mapping[str, Any]


def rename(document: Document) -> None:
    """Replace synonyms by the names of mindllm, in place. A key that is given under both names becomes a problem."""
    for section, names in SYNONYMS.items():
        values = at(document.data, section)
        for synonym, name in names.items() if isinstance(values, dict) else ():
            if synonym not in values:
                continue
            path: KeyPath = (*section, synonym)
            renamed: KeyPath = (*section, name)
            value = values.pop(synonym)
            if name in values:
                message = f"another name of {dotted(renamed)}, which is set as well (value {values[name]}); keep one"
                document.problems.append(Problem(document.origins.get(path), path, message))
                continue
            values[name] = value
            # errors in the value still name the place where it was written
            for inner in [inner for inner in document.origins if inner[: len(path)] == path]:
                document.origins[renamed + inner[len(path) :]] = document.origins.pop(inner)


def load_config(source: Source, overrides: Overrides = ()) -> RunConfig:
    """Read a run over its ``base``, changed by ``overrides``; a ``UserError`` names every mistake.

    Args:
        source: a YAML of mindllm or MindFormers; a Hugging Face directory, whose model the run fine-tunes with the keys of
            ``configs/base``; or a dictionary with the content of a YAML, whose ``base`` is relative to the working directory. A
            path below ``configs/`` that does not exist is looked up in the configurations of mindllm.
        overrides: options as on a command line (``--a.b.c=value``, ``--a.b.c value``, ``--flag``) or a mapping of dotted keys
            to values. ``--ignore-unknown-keys`` (``ignore_unknown_keys``) logs and ignores unknown keys of the YAML.
    """
    if isinstance(source, Mapping):
        return _load(_from_mapping(source), overrides, None)
    path = existing_or_shipped(Path(source))
    if is_hugging_face(path):
        return _load(_over_directory(path), overrides, None)
    document = read_file(path)
    if not document.data and not overrides:
        raise UserError.of(_at(path, f"holds no keys; write at least `{BASE}:` and what differs from that: {STARTS}"))
    return _load(document, overrides, path)


def _load(document: Document, overrides: Overrides, source: Path | None) -> RunConfig:
    """Build a run from a YAML of mindllm or of another program. Log what became of foreign keys, and keys without effect."""
    name = source or IN_MEMORY
    if reader := reader_for(document):
        conversion = reader.convert(document, overrides)
        config = build_config(conversion, source)
        logger.warning("%s", conversion.summary(name))
        for warning in conversion.warnings:
            logger.warning("%s: %s", name, warning)
    else:
        ignore_unknown = ignores_unknown(overrides)
        document = _with_base(document, source or Path(IN_MEMORY), (), ignore_unknown)
        config = _build(document, overrides, source, ignore_unknown)
    if source is not None:
        for path, message in check_unused(config):
            logger.warning("%s", config.problem(path, message))
    return config


def _from_mapping(values: Mapping[str, Any]) -> Document:
    """Return a copy of a dictionary as a document, with an absolute path as its ``base``."""
    if is_deeper(values):
        raise UserError(f"{IN_MEMORY}: {TOO_DEEP}")
    try:
        tree = plain(copy.deepcopy(dict(values)))
    except TypeError as error:
        raise UserError(f"{IN_MEMORY}: {error}; give texts, numbers, lists and dictionaries") from None
    if isinstance(base := tree.get(BASE), str | os.PathLike):
        tree[BASE] = str(Path.cwd() / existing_or_shipped(Path(base)))
    if problem := unusable_value(tree):
        raise UserError(f"{IN_MEMORY}: {problem}")
    if unnamed := [key for key in _keys(tree) if not isinstance(key, str)]:
        raise UserError(f"{IN_MEMORY}: {unnamed[0]!r}: a key must be a word")
    return Document(tree, dict(_origins(tree, (), Origin(option=IN_MEMORY))))


def _keys(tree: Any) -> Iterator[Any]:
    """Yield the keys of all dictionaries in a tree."""
    if isinstance(tree, dict):
        yield from tree
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _keys(value)


def _origins(tree: Any, path: KeyPath, origin: Origin) -> Iterator[tuple[KeyPath, Origin]]:
    """Yield the path of every value below ``path`` with its origin."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield (*path, key), origin
        yield from _origins(value, (*path, key), origin)


def _over_directory(directory: Path) -> Document:
    """Return the run that fine-tunes the model of a Hugging Face directory."""
    values = {
        BASE: str(shipped_configs() / HUGGING_FACE_BASE),
        "run_mode": "finetune",
        "load_checkpoint": str(directory),
        "lr_schedule": {"learning_rate": FINETUNING_RATE},
    }
    return Document(values, dict(_origins(values, (), Origin(file=str(directory)))))


def build_config(conversion: ForeignRun, source: Path | None) -> RunConfig:
    """Return the run that the YAML of another program was converted to; a ``UserError`` names all mistakes."""
    refused, document = conversion.document.problems, replace(conversion.document, problems=[])
    try:
        config = _build(document, conversion.overrides, source)
    except UserError as error:
        # a key may be missing because the conversion refused it
        written = [problem for problem in error.problems if problem.option or problem.path in document.origins]
        _refuse([*refused, *without_related(written, refused)])
        raise
    _refuse(refused)
    config._provenance = replace(
        config._provenance, theirs=conversion.source_values(), ignored=conversion.has_ignored_keys
    )
    return config


def read_file(path: Path) -> Document:
    """Read one YAML without its base; raise ``UserError`` for an invalid file."""
    return read_yaml(_text(path), str(path))


def override_config(config: RunConfig, overrides: Overrides) -> RunConfig:
    """Return ``config`` with some keys changed. Derived defaults (widths, ...) are computed again."""
    document = Document(plain(config.given()), dict(config._provenance.origins))
    changed = _build(document, overrides, config.source)
    changed._provenance = replace(changed._provenance, ignored=config.has_ignored_keys)
    return changed


def with_model(config: RunConfig, model: ModelConfig) -> RunConfig:
    """Return ``config`` with this model: other tuning, or another network, for which directories of weights are cleared."""
    before, after = config.model.config.model_dump(), model.model_dump()
    changed = {key: value for key, value in after.items() if value != before[key]}
    nowhere = dict.fromkeys(("load_checkpoint", "load_adapter", "adapter_id", "pretrained_model_dir"), "")
    model_keys = {f"model.model_config.{key}": value for key, value in changed.items()}
    return override_config(config, model_keys if {*changed} <= {"pet_config"} else {**nowhere, **model_keys})


def with_comments(config: RunConfig, comments: Mapping[KeyPath, str]) -> RunConfig:
    """Return ``config`` with a comment for each of some keys, which :func:`render_config` may show."""
    changed, origins = config.model_copy(), dict(config._provenance.origins)
    for path, comment in comments.items():
        origins[path] = replace(origins.get(path, Origin()), comment=comment)
    changed._provenance = replace(config._provenance, origins=origins)
    return changed


def render_config(config: RunConfig, commented: bool = False) -> str:
    """Return the resolved YAML, every key with its value; loading it gives an equal configuration.

    Args:
        commented: with the comments of the files it was read from, and the reasons of what was chosen.
    """
    if not commented:
        return write_yaml(tree_of(config))
    comments = {path: origin.comment for path, origin in config._provenance.origins.items() if origin.comment}
    return write_commented(tree_of(config), comments)


def tree_of(config: RunConfig) -> dict[str, Any]:
    """Return the resolved configuration as plain values, which :func:`load_config` takes."""
    return plain(config.model_dump(by_alias=True))


def _build(document: Document, overrides: Overrides, source: Path | None, ignore_unknown: bool = False) -> RunConfig:
    changes = override_document(overrides, document, RunConfig)
    rename(changes)
    document = merge(document, changes)
    document.problems.extend(null_texts(document, RunConfig))
    fill_from_pretrained(document)
    try:
        config, ignored = _validate(document, changes if ignore_unknown else None)
    except ValidationError as error:
        wrong = schema_problems(error, document, RunConfig, source)
        problems = [*document.problems, *drop_missing_model_keys(document.problems, wrong)]
        _refuse([*problems, *_hidden_problems(document, problems, source)], document.data)
        raise  # never: a validation error has problems
    config._provenance = Provenance(source, document.origins, ignored=ignored)
    _refuse([*document.problems, *_cross_problems(config)])
    return config


def _validate(document: Document, changes: Document | None) -> tuple[RunConfig, bool]:
    """Return the run, and whether unknown keys were ignored: those that ``changes`` did not add, if it is given."""
    ignored = False
    while True:
        try:
            return RunConfig.model_validate(document.data), ignored
        except ValidationError as error:
            unknown = [] if changes is None else unknown_paths(error, document.data, changes.origins)
            for path in unknown:
                place = closest_origin(document.origins, path)
                logger.warning("%s: %s: unknown key, ignored (%s)", place, dotted(path), IGNORE_UNKNOWN_KEYS)
                remove(document.data, path)
            if not unknown:
                raise
            ignored = True


def _cross_problems(config: RunConfig) -> list[Problem]:
    """Return the mistakes of keys that do not fit together."""
    if beyond := [config.problem(path, message) for path, message in check_limits(config)]:
        return beyond  # before building that many layers
    with_file_names(config.model.config)
    return [config.problem(path, message) for path, message in check_run(config)]


def _hidden_problems(document: Document, problems: Sequence[Problem], source: Path | None) -> list[Problem]:
    """Return mistakes of other keys, found by replacing or removing the invalid values."""
    try:
        data = copy.deepcopy(document.data)
    except TypeError:  # an object of a program that is not a value of YAML, which is refused already
        return []
    for number, problem in enumerate(problems):
        path = _outside_lists(problem.path)
        intended = intended_path(path, data, RunConfig) if number < MOST_SHOWN and at(data, path) is not None else None
        value = remove(data, path)
        section = at(data, intended[:-1]) if intended else None
        if intended and path == problem.path and isinstance(section, dict):
            section.setdefault(intended[-1], value)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError:
        return []
    config._provenance = Provenance(source, document.origins)
    return without_related(_cross_problems(config), problems)


def _outside_lists(path: KeyPath) -> KeyPath:
    """Return ``path``, or the path of the list around it: removing an entry would renumber the others."""
    number = next((place for place, key in enumerate(path) if isinstance(key, int)), len(path))
    return path[:number]


def _refuse(problems: Iterable[Problem], data: Mapping[str, Any] | None = None) -> None:
    """Raise all problems as one error; those that have no value yet get the one that ``data`` has there."""
    by_text = {str(problem): problem for problem in problems}
    if not by_text:
        return
    lines = list(by_text)
    more = [f"and {len(lines) - MOST_SHOWN:,} more mistakes"] if len(lines) > MOST_SHOWN else []
    valued = [
        replace(problem, value=at(data, problem.path)) if problem.value is None else problem
        for problem in by_text.values()
    ]
    raise UserError("\n".join([*lines[:MOST_SHOWN], *more]), valued)


def read_document(path: Path) -> Document:
    """Read one YAML over its base as an unchecked tree."""
    return _with_base(read_file(path), path, ())


def _with_base(document: Document, path: Path, readers: tuple[Path, ...], ignore_unknown: bool = False) -> Document:
    if reader := reader_for(document):
        return reader.convert(document, {"ignore_unknown_keys": ignore_unknown}).document
    rename(document)
    if BASE not in document.data:
        return document
    base = document.data.pop(BASE)
    wrong = partial(Problem, closest_origin(document.origins, (BASE,), path), (BASE,), value=base)
    if not isinstance(base, str):
        raise UserError.of(wrong(f"must be the path of a YAML file, relative to this one (value {base})"))
    base_path = _base_path(path, base)
    if os.path.realpath(base_path) in map(os.path.realpath, (*readers, path)):
        raise UserError.of(wrong(f"{base} is based on this file in turn"))
    if len(readers) >= MOST_BASES:
        raise UserError.of(wrong(f"this is base number {len(readers) + 1}; at most {MOST_BASES} are read"))
    try:
        base_document = read_file(base_path)
    except UserError as error:
        raise UserError.of(wrong(str(error))) from None
    return merge(_with_type(_with_base(base_document, base_path, (*readers, path), ignore_unknown)), document)


def _base_path(path: Path, base: str) -> Path:
    """Return the file that the ``base`` of ``path`` names: relative to it, or shipped."""
    file = Path(os.path.normpath(path.parent / base))
    return file if file.exists() else shipped_file(Path(base)) or file


def base_files(path: Path) -> list[Path]:
    """Return the base of a YAML, the base of that, and so on."""
    document = read_file(path)
    if BASE not in document.data:
        return []
    base = _base_path(path, document.data[BASE])
    return [base, *base_files(base)]


def _with_type(base: Document) -> Document:
    """Return ``base`` with the default type of its data loader, so that a YAML with another type replaces the section."""
    loader = child(base.data.get("train_dataset"), "data_loader")
    if isinstance(loader, dict):
        loader.setdefault("type", IndexedDataLoader.model_fields["type"].default)
    return base


def _text(path: Path) -> str:
    try:
        return read_text(path, LARGEST_YAML)
    except FileNotFoundError:
        raise UserError.of(_at(path, f"no such file{_similar(path)}")) from None
    except OSError as error:
        reason = f"is a directory, not a file{_within(path)}" if path.is_dir() else f"cannot be read: {error.strerror}"
        raise UserError.of(_at(path, reason)) from None


def _within(directory: Path) -> str:
    """Return a hint about the YAMLs in a directory: the resolved YAML of a run, else all by name."""
    if (resolved := directory / RESOLVED).is_file():
        return f"; of a run name its YAML: {resolved}"
    names = sorted(file.name for file in directory.glob("*.y*ml") if file.is_file())
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    listing = f"one of {', '.join(names[:MOST_NAMED])}{more}" if len(names) > 1 else "".join(names)
    return f"; name a YAML in it: {listing}" if names else ", and holds neither a YAML nor a model (config.json)"


def _at(path: Path, message: str) -> Problem:
    return Problem(Origin(str(path)), (), message)


def _similar(path: Path) -> str:
    """Return a hint about a missing file: a similar name in its directory, or a shipped model of that name."""
    files = [file for file in shipped_configs().rglob("*.yaml") if file.stem.partition("_")[2] == path.name]
    if files:
        return f"; did you mean {NAME}/{max(files).relative_to(shipped_configs()).as_posix()}?"
    hint = nearest(path.name, (file.name for file in path.parent.glob("*.yaml"))) if path.parent.is_dir() else ""
    return hint if "did you mean" in hint else ""


def plain(value: Any) -> Any:
    """Return ``value`` with tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
