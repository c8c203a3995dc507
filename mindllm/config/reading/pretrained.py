"""Keys from a Hugging Face directory: the architecture and the tokenizer that the YAML of a run omits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindllm.config.reading.document import Document, KeyPath, Origin, Problem
from mindllm.config.reading.problems import REQUIRED
from mindllm.config.run import RunConfig
from mindllm.errors import UserError, shortened
from mindllm.families import family_of
from mindllm.families.family import TRAINING_KEYS
from mindllm.families.hugging_face import (
    CONFIG,
    GENERATION_CONFIG,
    described_by,
    family_in,
    is_hugging_face,
    read_generation,
    read_json,
    read_model_config,
    tokenizer_in,
)
from mindllm.files import unexpanded
from mindllm.gguf import gguf_files

STATE = "state.json"  # of a checkpoint
DIRECTORY_KEYS = ("pretrained_model_dir", "load_checkpoint")
MODEL: KeyPath = ("model", "model_config")
TEXT_MODES = ("predict", "chat")  # generation_config.json supplies their section generation
VOCABULARY: KeyPath = ("processor", "tokenizer", "vocab_file")
PREFERENCES = {
    "seq_length",
    "initializer_range",
    "eos_token_id",
    "num_nextn_predict_layers",
    *TRAINING_KEYS,
}  # keys that a run may choose; others are fixed by the weights


def fill_from_pretrained(document: Document) -> None:
    """Add keys from the Hugging Face directories in ``document``, if the YAML omits them.

    A missing directory is accepted if no key has to come from it, so that a resolved YAML can be loaded anywhere.
    """
    for key in DIRECTORY_KEYS:
        named = document.data.get(key)
        if not isinstance(named, str) or not named:
            continue
        if reason := _path_error(named):
            document.problems.append(
                Problem(document.origins.get((key,)), (key,), f"{reason} (value {shortened(named)})")
            )
            document.data[key] = ""  # no other check reports it
            continue
        directory = Path(_adapter_base(named) or named)
        if is_hugging_face(directory):
            origin = Origin(file=str(described_by(directory)))
            for name, value in read_model_config(directory).model_dump(exclude_unset=True).items():
                _set_if_absent(document, (*MODEL, name), value, origin)
            if document.data.get("run_mode") in TEXT_MODES:
                origin = Origin(file=str(directory / GENERATION_CONFIG))
                for name, value in read_generation(directory).items():
                    _set_if_absent(document, ("generation", name), value, origin)
            tokenizer = tokenizer_in(directory)
            if tokenizer is not None:
                _set_if_absent(document, VOCABULARY, str(tokenizer), Origin(file=str(tokenizer)))
        elif problem := _directory_error(document, key, Path(named)):
            document.problems.append(Problem(document.origins.get((key,)), (key,), f"{problem} (value {named})"))


def _path_error(name: str) -> str:
    """Return why the system cannot have a file of this name; empty if it can."""
    try:
        Path(name).stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
    except (OSError, ValueError) as error:
        return f"invalid path: {error.strerror if isinstance(error, OSError) else error}"
    return ""


def drop_missing_model_keys(problems: Sequence[Problem], later: Sequence[Problem]) -> list[Problem]:
    """Return ``later`` without missing model keys, if ``problems`` report the directory that would supply them."""
    if not any(len(problem.path) == 1 and problem.path[0] in DIRECTORY_KEYS for problem in problems):
        return list(later)
    return [
        problem
        for problem in later
        if not (problem.path[:2] == MODEL[: len(problem.path)] and problem.message == REQUIRED)
    ]


def _adapter_base(checkpoint: str) -> str:
    """Return the directory of the base weights of a checkpoint with adapters; empty for other checkpoints."""
    state = Path(checkpoint) / STATE
    base = read_json(state).get("base") if state.is_file() else None
    return str(base.get("path") or "") if isinstance(base, dict) else ""


def _directory_error(document: Document, key: str, directory: Path) -> str:
    """Return the problem with a path that is not a Hugging Face directory; empty for a checkpoint, or a path created later."""
    if files := gguf_files(directory):
        return f"holds {len(files)} GGUF files; name one of them, such as {files[0].name}"
    if directory.exists():
        return f"not a Hugging Face directory, it has no {CONFIG}" if key == "pretrained_model_dir" else ""
    if "hidden_size" in _section(document, MODEL):
        return ""
    return f"does not exist; it was to give the architecture, which model.model_config does not{unexpanded(directory)}"


def check_pretrained(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Check the architecture of the YAML against that of the directories."""
    for directory in (config.pretrained_model_dir, config.load_checkpoint):
        if not directory or not is_hugging_face(directory):
            continue
        expected, ours, family = read_model_config(directory), config.model.config, family_in(directory)
        for key in sorted(expected.model_fields_set - PREFERENCES):
            file_value, value = getattr(expected, key), getattr(ours, key)
            if file_value != value:
                source = f"{family.their_name(key)} of {described_by(directory)}, which is {_shown(file_value)}"
                yield (*MODEL, key), f"contradicts {source} (value {_shown(value)}); remove the key"


def check_family(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Check that a family has this architecture."""
    if any(check_pretrained(config)):
        return  # check_pretrained reports it
    try:
        family_of(config.model.config)
    except UserError as error:
        yield (*MODEL, "model_type"), str(error)


def _section(document: Document, path: KeyPath) -> dict[str, Any]:
    """Return the section at ``path``, or an empty one."""
    values: Any = document.data
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _set_if_absent(document: Document, path: KeyPath, value: Any, origin: Origin) -> None:
    values: Any = document.data
    for key in path[:-1]:
        if values.get(key) is None:
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            return  # the schema reports it
    if values.get(path[-1]) in (None, ""):
        values[path[-1]] = value
        document.origins[path] = origin


def _shown(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
