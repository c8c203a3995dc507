"""The commands of ``mindllm weights``: import, export, and adapters written, merged and removed, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.config import ModelConfig, is_hugging_face, load_config, read_model_config, tokenizer_in
from mindllm.data import load_tokenizer
from mindllm.errors import RunFailed, UserError
from mindllm.families.hugging_face import read_json
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.checkpoint import CheckpointNotSavedError, CheckpointStore, RankTensors, load_checkpoint
from mindllm.train.checkpoint.loading import Base
from mindllm.train.checkpoint.names import refuse_existing
from mindllm.train.checkpoint.tensors import LazyTensor, TensorSource, payload_bytes, stored_tensors
from mindllm.weight_files.adapters import checkpoint_adapter, merge_adapter, require_reversible, unmerge_adapter
from mindllm.weight_files.hugging_face import write_weights
from mindllm.weight_files.mindformers import is_mindformers
from mindllm.weight_files.opening import OpenedWeights, open_model, open_weights
from mindllm.weight_files.peft import CONFIG_FILE, is_peft, write_bottlenecks, write_peft
from mindllm.weight_files.pretrained import read_adapter


def import_weights(
    source: Path, directory: Path, architecture: Path | None = None, progress: Progress = unwatched
) -> Path:
    """Write weights of Hugging Face or MindFormers as checkpoint ``directory/llm-0`` and return its path.

    Arguments:
        architecture: the YAML of a run or a Hugging Face directory, which MindFormers' weights require.

    Raises:
        UserError: the source is damaged or does not match the architecture, or the checkpoint exists.
        RunFailed: the checkpoint could not be written.
    """
    model = _import_model(source, architecture)
    store = CheckpointStore(directory, keep_checkpoint_max=2**31)
    refuse_existing(directory / f"{store.prefix}-0")
    opened = open_weights(source, model)
    tokenizer = opened.tokenizer or tokenizer_in(architecture or source)
    state = {
        "step": 0,
        "tokenizer": str(tokenizer.resolve()) if tokenizer else "",
        "identity": {"model": {"config": model.model_dump(mode="json")}},
    }
    existed = directory.exists()
    try:
        return store.save(0, {0: RankTensors(report_reading("importing", opened.weights, progress), {})}, state)
    except CheckpointNotSavedError as error:
        raise RunFailed(str(error)) from error
    finally:
        if not existed:
            with suppress(OSError):  # the directory has the checkpoint, or was never created
                directory.rmdir()


def _import_model(source: Path, architecture: Path | None) -> ModelConfig:
    """Return the architecture that the source or the option ``--model`` defines."""
    if is_hugging_face(source):
        if architecture is not None:
            raise UserError(f"--model {architecture}: {source} has its own config.json; leave the option out")
        return read_model_config(source)
    if not is_mindformers(source):
        raise UserError(
            f"{source}: neither a Hugging Face directory (it has no config.json) nor weights of MindFormers (.ckpt, "
            ".safetensors, rank_0)"
        )
    if architecture is None:
        raise UserError(
            f"{source}: weights of MindFormers do not define their architecture; add --model RUN.yaml, or a directory with a "
            "config.json"
        )
    return read_model_config(architecture) if architecture.is_dir() else load_config(architecture).model.config


def export_weights(
    source: Path,
    directory: Path,
    dtype: str,
    max_shard_bytes: int,
    tokenizer_file: Path | None,
    progress: Progress = unwatched,
) -> Path:
    """Write a checkpoint or a GGUF file as Hugging Face directory ``directory``. Raises like ``write_weights``.

    The default tokenizer is that in the GGUF file, or of the run that saved the checkpoint, if it still exists.
    """
    refuse_existing(directory)
    model, opened = open_model(source, "CHECKPOINT")
    tokenizer_file = tokenizer_file or opened.tokenizer
    tokenizer = None if tokenizer_file is None else load_tokenizer(tokenizer_file)
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{tokenizer_file}: has {tokenizer.vocab_size} tokens, more than the {model.vocab_size} of {source}; "
            "pass the tokenizer the model was trained with"
        )
    options: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "tokenizer": tokenizer}
    return write_weights(directory, model, report_reading("exporting", opened.weights, progress), **options)


def export_adapter(source: Path, directory: Path) -> Path:
    """Write the adapter in checkpoint ``source`` as ``directory``, in PEFT's format.

    Raises:
        UserError: the checkpoint has no adapter, or the directory exists.
        RunFailed: the directory could not be written.
    """
    refuse_existing(directory)
    checkpoint = load_checkpoint(source, option="CHECKPOINT", with_optimizer=False, read=stored_tensors)
    adapter = checkpoint_adapter(checkpoint)
    if adapter is None:
        raise UserError(f"{source}: has all weights of a model and no adapter; mindllm weights export writes it")
    write = write_bottlenecks if adapter.pet.tuner.own_format else write_peft
    return write(directory, checkpoint.model, adapter.weights, adapter.base)


def merge(
    source: Path, directory: Path, base: Path | None, options: Mapping[str, Any], progress: Progress = unwatched
) -> Path:
    """Write a base with adapter ``source`` merged as Hugging Face directory. The default base is the one the adapter names.

    Raises:
        UserError: the adapter was trained with another base, or the base does not exist.
        RunFailed: the directory could not be written.
    """
    refuse_existing(directory)
    base = base or _recorded_base(source)
    base_model, opened = open_model(base)
    adapter = read_adapter(source, base_model, opened.weights)
    if adapter.pet.tuner.own_format:
        raise UserError(
            f"{source}: no Hugging Face model has bottleneck adapters; use load_checkpoint: BASE and load_adapter instead"
        )
    model = adapter.model(base_model)
    adapter.require_base(opened.weights, str(base))
    weights = merge_adapter(model, opened.weights, adapter.weights)
    return _write(directory, model.merged, opened, weights, options, progress)


def unmerge(
    source: Path, adapter_path: Path, directory: Path, options: Mapping[str, Any], progress: Progress = unwatched
) -> Path:
    """Write the weights of ``source`` without the adapter that was merged into them. Raises like :func:`merge`.

    Rounding by the merge remains: with ``--dtype float32`` for both, the base is restored to fp32 precision.
    """
    refuse_existing(directory)
    model, opened = open_model(source)
    adapter = read_adapter(adapter_path, model)
    require_reversible(adapter.pet)
    weights = unmerge_adapter(adapter.model(model), opened.weights, adapter.weights)
    return _write(directory, model, opened, weights, options, progress)


def _write(
    directory: Path,
    model: ModelConfig,
    opened: OpenedWeights,
    weights: Mapping[str, TensorSource],
    options: Mapping[str, Any],
    progress: Progress,
) -> Path:
    tokenizer = None if opened.tokenizer is None else load_tokenizer(opened.tokenizer)
    sources = report_reading("writing", weights, progress)
    return write_weights(directory, model, sources, tokenizer=tokenizer, **options)


def _recorded_base(source: Path) -> Path:
    """Return the base that an adapter names."""
    if is_peft(source):
        path = str(read_json(source / CONFIG_FILE).get("base_model_name_or_path") or "")
    else:
        checkpoint = load_checkpoint(source, option="ADAPTER", with_optimizer=False, read=stored_tensors)
        path = (Base.from_state(checkpoint.state) or Base("", "")).path
    if not path or not Path(path).exists():
        problem = f"its base {path} does not exist" if path else "it does not name its base"
        raise UserError(f"{source}: {problem}; add --base DIRECTORY")
    return Path(path)


def report_reading(task: str, tensors: Mapping[str, TensorSource], progress: Progress) -> dict[str, LazyTensor]:
    """Return ``tensors`` that report to ``progress`` the bytes that have been read."""
    total, read = payload_bytes(tensors), 0

    def make(source: TensorSource) -> np.ndarray:
        nonlocal read
        values = np.asarray(source)
        read += values.nbytes
        progress(task, min(read, total), total)
        return values

    progress(task, read, total)
    return {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: make(tensor))  # type: ignore[misc]
        for name, tensor in tensors.items()
    }
