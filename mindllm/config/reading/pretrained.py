"""What a run takes from a Hugging Face directory: the keys of the architecture and the tokenizer that its YAML leaves out."""

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
TEXT_MODES = ("predict", "chat")  # of which generation_config.json gives the keys of section generation
VOCABULARY: KeyPath = ("processor", "tokenizer", "vocab_file")
PREFERENCES = {
    "seq_length",
    "initializer_range",
    "eos_token_id",
    "num_nextn_predict_layers",
    *TRAINING_KEYS,
}  # what a run may choose; the rest is the weights' own


def fill_from_pretrained(document: Document) -> None:
    """Writes into ``document`` what the Hugging Face directories it names decide and it does not say itself.

    A directory that is not there is no problem where nothing has to come from it: a resolved YAML can be loaded anywhere.
    """
    for key in DIRECTORY_KEYS:
        named = document.data.get(key)
        if not isinstance(named, str) or not named:
            continue
        if reason := _why_no_path(named):
            document.problems.append(
                Problem(document.origins.get((key,)), (key,), f"{reason} (value {shortened(named)})")
            )
            document.data[key] = ""  # nothing else is said of it
            continue
        directory = Path(_base_of_adapter(named) or named)
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
        elif problem := _why_nothing_is_filled(document, key, Path(named)):
            document.problems.append(Problem(document.origins.get((key,)), (key,), f"{problem} (value {named})"))


def _why_no_path(name: str) -> str:
    """Return why the system has no file of this name, whatever is on the disk; empty where it may have one."""
    try:
        Path(name).stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
    except (OSError, ValueError) as error:
        return f"is no path: {error.strerror if isinstance(error, OSError) else error}"
    return ""


def without_what_follows(found: Sequence[Problem], further: Sequence[Problem]) -> list[Problem]:
    """Return further mistakes without keys of the network that are missing because the directory is, which is told."""
    missing = any(len(problem.path) == 1 and problem.path[0] in DIRECTORY_KEYS for problem in found)
    return [
        one for one in further if not (missing and one.path[:2] == MODEL[: len(one.path)] and one.message == REQUIRED)
    ]


def _base_of_adapter(checkpoint: str) -> str:
    """The directory of the weights that a checkpoint with adapters was trained beside; empty for any other."""
    state = Path(checkpoint) / STATE
    base = read_json(state).get("base") if state.is_file() else None
    return str(base.get("path") or "") if isinstance(base, dict) else ""


def _why_nothing_is_filled(document: Document, key: str, directory: Path) -> str:
    """The mistake, or nothing: ``load_checkpoint`` may be a checkpoint of ours, and either may be made later."""
    if several := gguf_files(directory):
        return f"holds {len(several)} GGUF files; name one of them, such as {several[0].name}"
    if directory.exists():
        return f"not a Hugging Face directory, it has no {CONFIG}" if key == "pretrained_model_dir" else ""
    if "hidden_size" in _section(document, MODEL):
        return ""
    return f"does not exist; it was to give the architecture, which model.model_config does not{unexpanded(directory)}"


def check_pretrained(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """The architecture the YAML gives against that of the directories."""
    for directory in (config.pretrained_model_dir, config.load_checkpoint):
        if not directory or not is_hugging_face(directory):
            continue
        theirs, ours, family = read_model_config(directory), config.model.config, family_in(directory)
        for key in sorted(theirs.model_fields_set - PREFERENCES):
            wanted, value = getattr(theirs, key), getattr(ours, key)
            if wanted != value:
                said = f"{family.their_name(key)} of {described_by(directory)}, which is {_shown(wanted)}"
                yield (*MODEL, key), f"contradicts {said} (value {_shown(value)}); remove the key"


def check_family(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """An architecture that no family has: what its parts together would compute is nobody's model."""
    if any(check_pretrained(config)):
        return  # reported as what it is
    try:
        family_of(config.model.config)
    except UserError as error:
        yield (*MODEL, "model_type"), str(error)


def _section(document: Document, path: KeyPath) -> dict[str, Any]:
    """The section at ``path``; an empty one where there is none, or where it is no section."""
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
            return  # the schema says what is wrong with it
    if values.get(path[-1]) in (None, ""):
        values[path[-1]] = value
        document.origins[path] = origin


def _shown(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
