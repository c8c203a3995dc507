"""Import and export of weights, a tensor at a time; a callback is told of the bytes that are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.config import ModelConfig, is_hugging_face, load_config, read_model_config, tokenizer_in
from mindllm.data import load_tokenizer
from mindllm.errors import RunFailed, UserError
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.checkpoint import CheckpointNotSavedError, CheckpointStore, RankTensors, load_checkpoint
from mindllm.train.checkpoint.loading import Base, model_of
from mindllm.train.checkpoint.names import refuse_existing
from mindllm.train.checkpoint.tensors import TensorSource, payload_bytes, stored_tensors
from mindllm.train.job.output_directory import CHECKPOINTS, newest_checkpoint
from mindllm.weight_files.hugging_face import read_weights
from mindllm.weight_files.hugging_face_export import export_hugging_face
from mindllm.weight_files.mindformers import is_mindformers, read_mindformers
from mindllm.weight_files.peft import is_peft


@dataclass(frozen=True)
class Watched:
    """``source``, telling ``done`` how many bytes it had when it became an array."""

    source: TensorSource
    done: Callable[[int], None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        values = np.asarray(self.source, dtype)
        self.done(values.nbytes)
        return values


@dataclass(frozen=True)
class Whole:
    """A model with all its weights, and where its tokenizer is, if anywhere."""

    model: ModelConfig
    weights: Mapping[str, TensorSource]
    tokenizer: Path | None


def checkpoint_in(path: Path) -> Path:
    """Return the newest checkpoint where ``path`` is the output directory of a run; anything else as it is.

    Raises:
        UserError: the run has no checkpoint yet.
    """
    if not (path / CHECKPOINTS).is_dir() or is_hugging_face(path) or is_peft(path) or is_mindformers(path):
        return path
    return newest_checkpoint(path)


def import_weights(
    source: Path, directory: Path, architecture: Path | None = None, progress: Progress = unwatched
) -> Path:
    """Writes the weights of ``source``, of Hugging Face or MindFormers, as checkpoint ``directory/llm-0``; returns its path.

    ``architecture`` is the YAML of a run or a Hugging Face directory: weights of MindFormers do not tell it.

    Raises:
        UserError: the source is damaged or not of the architecture, or the checkpoint is there already.
        RunFailed: it could not be written.
    """
    model = _architecture(source, architecture)
    store = CheckpointStore(directory, keep_checkpoint_max=2**31)
    refuse_existing(directory / f"{store.prefix}-0")
    weights = read_weights(source, model) if is_hugging_face(source) else read_mindformers(source, model)
    place = source if is_hugging_face(source) else architecture or source
    tokenizer = tokenizer_in(place)
    state = {
        "step": 0,
        "tokenizer": str(tokenizer.resolve()) if tokenizer else "",
        "identity": {"model": {"config": model.model_dump(mode="json")}},
    }
    existed = directory.exists()
    try:
        return store.save(0, {0: RankTensors(watched("importing", weights, progress), {})}, state)
    except CheckpointNotSavedError as error:
        raise RunFailed(str(error)) from error
    finally:
        if not existed:
            with suppress(OSError):  # it has the checkpoint, or was never made
                directory.rmdir()


def _architecture(source: Path, given: Path | None) -> ModelConfig:
    """What the weights are of: ``source`` says it itself, or ``given`` does."""
    if is_hugging_face(source):
        if given is not None:
            raise UserError(f"--model {given}: {source} has a config.json of its own; leave the option out")
        return read_model_config(source)
    if not is_mindformers(source):
        raise UserError(
            f"{source}: neither a Hugging Face directory (it has no config.json) nor weights of MindFormers (.ckpt, "
            ".safetensors, rank_0)"
        )
    if given is None:
        raise UserError(
            f"{source}: weights of MindFormers do not tell their architecture; name it: --model RUN.yaml, or a directory with a "
            "config.json"
        )
    return read_model_config(given) if given.is_dir() else load_config(given).model.config


def export_weights(
    source: Path,
    directory: Path,
    dtype: str,
    max_shard_bytes: int,
    tokenizer_file: Path | None,
    progress: Progress = unwatched,
) -> Path:
    """Writes a checkpoint or a GGUF file as Hugging Face directory ``directory``; errors as ``export_hugging_face``.

    Without ``tokenizer_file`` the tokenizer is that in the GGUF file, or of the run that saved the checkpoint, where it still is.
    """
    refuse_existing(directory)
    whole = read_whole(source, "CHECKPOINT")
    model, tokenizer_file = whole.model, tokenizer_file or whole.tokenizer
    tokenizer = None if tokenizer_file is None else load_tokenizer(tokenizer_file)
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{tokenizer_file}: has {tokenizer.vocab_size} tokens, more than the {model.vocab_size} of {source}; "
            "give the tokenizer the model was trained with"
        )
    options: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "tokenizer": tokenizer}
    return export_hugging_face(directory, model, watched("exporting", whole.weights, progress), **options)


def read_whole(path: Path, option: str = "BASE") -> Whole:
    """A model and all its weights, from a Hugging Face directory, a GGUF file or a checkpoint; none is read yet."""
    if is_hugging_face(path):
        model = read_model_config(path)
        return Whole(model, read_weights(path, model), tokenizer_in(path))
    checkpoint = load_checkpoint(path, option=option, with_optimizer=False, read=stored_tensors)
    if Base.of(checkpoint.state) is not None:
        raise UserError(
            f"{path}: holds an adapter and not all weights; mindllm weights merge {path} DIR puts both together"
        )
    recorded = Path(checkpoint.state.get("tokenizer") or "")
    return Whole(model_of(checkpoint).base, checkpoint.weights, recorded if recorded.is_file() else None)


def watched(doing: str, tensors: Mapping[str, TensorSource], progress: Progress) -> dict[str, Watched]:
    """Return ``tensors``, of which ``progress`` is told how many bytes have been read of how many."""
    total, read = payload_bytes(tensors), 0

    def done(size: int) -> None:
        nonlocal read
        read += size
        progress(doing, min(read, total), total)

    progress(doing, read, total)
    return {name: Watched(tensor, done) for name, tensor in tensors.items()}
