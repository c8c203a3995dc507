"""The entry point for reading: ``open_weights`` recognizes the format of a path and returns its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.config import ModelConfig, is_hugging_face, read_model_config, tokenizer_in
from mindllm.errors import UserError
from mindllm.gguf import gguf_file
from mindllm.train.checkpoint import Checkpoint, load_checkpoint
from mindllm.train.checkpoint.loading import Base
from mindllm.train.checkpoint.manifest import WEIGHTS, read_manifest
from mindllm.train.checkpoint.tensors import TensorSource, stored_tensors
from mindllm.weight_files.hugging_face import read_hugging_face, weight_files
from mindllm.weight_files.mindformers import is_mindformers, mindformers_files, mindformers_tensors, read_mindformers
from mindllm.weight_files.peft import is_peft


@dataclass(frozen=True)
class OpenedWeights:
    """Weights in files, read when they are needed.

    Attributes:
        kind: the format, such as "Hugging Face directory".
        model: the architecture, or None for MindFormers' files that were opened without one.
        weights: by mindllm's names, or by MindFormers' where ``model`` is None.
        tokenizer: the tokenizer's file or directory, if any.
        checkpoint: the checkpoint of mindllm that the weights are from, if they are.
    """

    path: Path
    kind: str
    model: ModelConfig | None
    weights: Mapping[str, TensorSource]
    tokenizer: Path | None = None
    checkpoint: Checkpoint | None = None

    @property
    def files(self) -> list[str]:
        """The names of the files of weights."""
        if self.checkpoint is not None:
            return read_manifest(self.path).names(WEIGHTS)
        if is_hugging_face(self.path):
            return [file.name for file in weight_files(self.path)]
        files = mindformers_files(self.path)
        return [str(file.relative_to(self.path)) if self.path.is_dir() else file.name for file in files]

    @property
    def is_adapter(self) -> bool:
        """True for a checkpoint that leaves out its frozen base."""
        return self.checkpoint is not None and Base.from_state(self.checkpoint.state) is not None


def open_weights(
    path: Path | str,
    model: ModelConfig | None = None,
    *,
    option: str = "PATH",
    read: Callable[[Path], Mapping[str, Any]] = stored_tensors,
) -> OpenedWeights:
    """Open a Hugging Face directory, a GGUF file, MindFormers' files, or a checkpoint of mindllm.

    Arguments:
        model: the architecture that the weights must match. By default the files define it, except MindFormers'.
        option: the option that errors about checkpoints name.
        read: makes tensors of a checkpoint's file, see ``load_checkpoint``.

    Raises:
        UserError: files are missing or damaged, or do not match the architecture.
    """
    place = Path(path)
    if is_hugging_face(path):
        kind = "GGUF file" if gguf_file(place) else "Hugging Face directory"
        architecture = model or read_model_config(place)
        return OpenedWeights(place, kind, architecture, read_hugging_face(place, architecture), tokenizer_in(place))
    if is_mindformers(path):
        weights = mindformers_tensors(place) if model is None else read_mindformers(place, model)
        return OpenedWeights(place, "weights of MindFormers", model, weights)
    checkpoint = load_checkpoint(path, option=option, with_optimizer=False, read=read)
    if model is not None:
        checkpoint.refuse_simulated()
        if Base.from_state(checkpoint.state) is None:
            checkpoint.require_weights(model.architecture.weight_shapes())
    kind = f"checkpoint of step {checkpoint.step}"
    return OpenedWeights(place, kind, model or checkpoint.model, checkpoint.weights, checkpoint.tokenizer, checkpoint)


def open_model(path: Path, option: str = "BASE") -> tuple[ModelConfig, OpenedWeights]:
    """Open all weights of a model, and return its architecture without adapters.

    Raises:
        UserError: the files are an adapter, or do not define the architecture.
    """
    opened = open_weights(path, option=option)
    if opened.model is None:
        raise UserError(
            f"{option}={path}: weights of MindFormers do not define their architecture; run mindllm weights import {path} DIR "
            "--model YAML first"
        )
    if opened.is_adapter:
        raise UserError(f"{path}: is an adapter without its base; mindllm weights merge {path} DIR combines them")
    return opened.model.base, opened


def latest_weights(path: Path) -> Path:
    """Return the newest checkpoint if ``path`` is the output directory of a run, or ``path`` itself.

    Raises:
        UserError: the run has no checkpoint yet.
    """
    from mindllm.train.job.output_directory import CHECKPOINTS, newest_checkpoint  # imports MindSpore

    if not (path / CHECKPOINTS).is_dir() or is_hugging_face(path) or is_peft(path) or is_mindformers(path):
        return path
    return newest_checkpoint(path)
