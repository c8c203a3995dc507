"""What a person names as a model: a Hugging Face directory, a checkpoint, the output of a run, or an adapter of PEFT."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.config import ModelConfig, is_hugging_face, read_model_config, tokenizer_in
from mindllm.config.precision import TYPES
from mindllm.errors import LONGEST_PART, UserError, bounded, nearest
from mindllm.families.hugging_face import CONFIG, read_generation, read_json
from mindllm.recipes.licence import licence_line
from mindllm.recipes.recipe import Choice

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
ADDRESS = re.compile(r"(https?:)//?(?=\w)")  # as a path it has one slash
CHECKPOINTS = "checkpoint"  # below the output directory of a run
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
MANIFEST, STATE = "manifest.json", "state.json"  # of a checkpoint
OF_THE_RUN = {"seq_length", "pet_config", *TYPES}  # keys that are chosen for each run
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: what a run names it by, and what its files say.

    Attributes:
        path: what the person named.
        weights: ``load_checkpoint`` of a run.
        adapter: ``load_adapter`` of a run; empty where there is none.
        directory: the Hugging Face directory of the weights, which has the files about generating; None for a checkpoint that
            was trained from scratch.
        architecture: the network, without an adapter.
        tokenizer: the file of the tokenizer; empty where none is known.
    """

    path: Path
    weights: Path
    adapter: str
    directory: Path | None
    architecture: ModelConfig
    tokenizer: str

    @property
    def name(self) -> str:
        """A short name for files: that of the directory the person named."""
        return self.path.resolve().name.removesuffix(".gguf") or "model"

    @property
    def dtype(self) -> str:
        """The type that ``config.json`` says the weights are computed in; ``float32`` where it says none."""
        if self.directory is None or not (self.directory / CONFIG).is_file():
            return "float32"
        content = read_json(self.directory / CONFIG)
        told = content.get("dtype") or content.get("torch_dtype")
        return str(told) if told in DTYPES else "float32"

    @property
    def is_tuned(self) -> bool:
        """Whether it is what was trained beside frozen weights, which its files leave out."""
        pet = self.architecture.pet_config
        return pet is not None and not pet.tuner.of_all_weights

    def keys(self) -> dict[str, Any]:
        """The network as keys of ``model.model_config``, of a checkpoint that no Hugging Face directory describes; else none."""
        if self.directory is not None:
            return {}
        tree = self.architecture.base.model_dump(mode="json", by_alias=True)
        fields = {info.alias or name: info for name, info in ModelConfig.model_fields.items()}
        given = {key: value for key, value in tree.items() if fields[key].is_required() or value != fields[key].default}
        return {key: value for key, value in given.items() if key not in OF_THE_RUN and value is not None}

    def choices(self) -> Iterator[Choice]:
        """Yield network and tokenizer where no Hugging Face directory gives them to a run: those of a checkpoint."""
        if self.directory is not None:
            return
        for key, value in self.keys().items():
            yield Choice(f"model.model_config.{key}", value, "of the checkpoint")
        if self.tokenizer:
            yield Choice("processor.tokenizer.vocab_file", self.tokenizer, "of the checkpoint")

    def generation(self) -> dict[str, Any]:
        """Return the keys of section ``generation`` that ``generation_config.json`` sets."""
        return read_generation(self.directory) if self.directory else {}

    def notes(self) -> tuple[str, ...]:
        """Lines that a person should read before using the model: what its licence forbids."""
        line = licence_line(self.directory) if self.directory else ""
        return (line,) if line else ()


def find_model(named: str | Path, base: str | Path | None = None) -> ModelSource:
    """Return the model at a path; ``base`` names the weights of an adapter where its own file does not find them.

    Raises:
        UserError: there is nothing, or nothing that is a model; says what is there and what to write.
    """
    path = Path(named)
    if not path.exists():
        raise UserError(_missing(path))
    if is_hugging_face(path):
        return _of_directory(path, path)
    if (path / ADAPTER_CONFIG).is_file():
        return _of_adapter(path, base)
    if (path / MANIFEST).is_file():
        return _of_checkpoint(path, path)
    if (path / CHECKPOINTS).is_dir():
        return _of_run(path)
    raise UserError(f"{path}: {_why_no_model(path)}")


def _of_directory(path: Path, directory: Path, adapter: str = "") -> ModelSource:
    return ModelSource(
        path, directory, adapter, directory, read_model_config(directory), str(tokenizer_in(directory) or "")
    )


def _of_adapter(path: Path, base: str | Path | None) -> ModelSource:
    told = base or read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(told, str | Path) or not is_hugging_face(told):
        where = f"'{bounded(str(told), LONGEST_PART)}', which is no model directory here" if told else "nothing"
        raise UserError(f"{path / ADAPTER_CONFIG}: base_model_name_or_path names {where}; give --base DIR")
    return _of_directory(path, Path(told), str(path))


def _of_run(path: Path) -> ModelSource:
    from mindllm.train.job.output_directory import newest_checkpoint

    return _of_checkpoint(path, newest_checkpoint(path))


def _of_checkpoint(path: Path, checkpoint: Path) -> ModelSource:
    from mindllm.train.checkpoint import load_checkpoint
    from mindllm.train.checkpoint.tensors import stored_tensors

    found = load_checkpoint(checkpoint, option="MODEL", with_optimizer=False, read=stored_tensors)
    base = found.state.get("base")
    trained_beside = Path(str(base.get("path") or "")) if isinstance(base, dict) else None
    directory = trained_beside if trained_beside and is_hugging_face(trained_beside) else None
    tokenizer = str(found.state.get("tokenizer") or "")
    return ModelSource(path, checkpoint, "", directory, found.model, tokenizer)


def _missing(path: Path) -> str:
    text = ADDRESS.sub(r"\1//", bounded(str(path), LONGEST_PART))
    if ADDRESS.match(text):
        return f"{text}: is an address, not a directory; what it shows is downloaded first: mindllm fetch {text}"
    if HUB_NAME.fullmatch(text) and not path.parent.exists():
        return f"{text}: no such directory; a name on the hub is downloaded first: mindllm fetch {text}"
    if checkpoints := _steps_beside(path):
        return f"{text}: no such checkpoint{checkpoints}"
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    hint = nearest(path.name, beside)
    return f"{text}: no such directory{hint if 'did you mean' in hint else '; name a directory with config.json'}"


def _checkpoints_in(path: Path) -> list[Path]:
    from mindllm.train.checkpoint.names import entries

    return [entry.path for entry in entries(path) if (entry.path / MANIFEST).is_file()]


def _steps_beside(path: Path) -> str:
    from mindllm.train.checkpoint.names import entries, parse_entry, suggest_checkpoints

    return suggest_checkpoints(path) if parse_entry(path) and entries(path.parent) else ""


def _why_no_model(path: Path) -> str:
    """What a path is in place of a model."""
    if path.is_file():
        return "is a file; a model is a directory with config.json, or a .gguf file"
    if checkpoints := _checkpoints_in(path):
        return f"holds checkpoints; name one of them, such as {checkpoints[-1]}"
    inside = sorted(entry.name for entry in path.iterdir())
    below = [name for name in inside if is_hugging_face(path / name)]
    if below:
        return f"is no model, but {below[0]} in it is: name {path / below[0]}"
    if any(name.endswith((".safetensors", ".bin")) for name in inside):
        return f"has weights and no {CONFIG}; copy that file from where the weights come from"
    holds = ", ".join(inside[:3]) + (", …" if len(inside) > 3 else "") if inside else "nothing"
    return f"is no model: it has no {CONFIG} (it holds {holds})"
