"""Adapters out of checkpoints in PEFT's format, into the weights they stand beside, and out of these again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindllm.data import load_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError
from mindllm.families.hugging_face import read_json
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.checkpoint import load_checkpoint
from mindllm.train.checkpoint.loading import Base, model_of
from mindllm.train.checkpoint.names import refuse_existing
from mindllm.train.checkpoint.tensors import TensorSource, stored_tensors
from mindllm.weight_files.adapter import adapter_of_checkpoint
from mindllm.weight_files.bottlenecks import write_bottlenecks
from mindllm.weight_files.convert import Whole, read_whole, watched
from mindllm.weight_files.hugging_face_export import export_hugging_face
from mindllm.weight_files.merging import merged, require_reversible, unmerged
from mindllm.weight_files.peft import CONFIG_FILE, is_peft, write_peft
from mindllm.weight_files.pretrained import read_adapter


def export_adapter(source: Path, directory: Path) -> Path:
    """Writes what checkpoint ``source`` holds beside its base as ``directory``, in PEFT's format.

    Raises:
        UserError: it holds no adapter, or the directory is there already.
        RunFailed: it could not be written.
    """
    refuse_existing(directory)
    checkpoint = load_checkpoint(source, option="CHECKPOINT", with_optimizer=False, read=stored_tensors)
    adapter = adapter_of_checkpoint(checkpoint)
    if adapter is None:
        raise UserError(f"{source}: holds all weights of a model and no adapter; mindllm weights export writes it")
    write = write_bottlenecks if adapter.pet.tuner.own_format else write_peft
    return write(directory, model_of(checkpoint), adapter.weights, adapter.base)


def merge(
    source: Path, directory: Path, base: Path | None, options: Mapping[str, Any], progress: Progress = unwatched
) -> Path:
    """Writes the base with adapter ``source`` in it as Hugging Face directory; without ``base``, that which the adapter names.

    Raises:
        UserError: the adapter is of another base, or the base is not there.
        RunFailed: it could not be written.
    """
    refuse_existing(directory)
    place = base or _named_base(source)
    beneath = read_whole(place)
    adapter = read_adapter(source, beneath.model, beneath.weights)
    if adapter.pet.tuner.own_format:
        raise UserError(
            f"{source}: bottlenecks are in no Hugging Face model; load_checkpoint: BASE and load_adapter use them"
        )
    model = adapter.model(beneath.model)
    adapter.require_base(beneath.weights, str(place))
    whole = replace(beneath, model=model.merged)
    return _export(directory, whole, merged(model, beneath.weights, adapter.weights), options, progress)


def unmerge(
    source: Path, taken_out: Path, directory: Path, options: Mapping[str, Any], progress: Progress = unwatched
) -> Path:
    """Writes the weights of ``source`` without adapter ``taken_out``, which was merged into them; errors as :func:`merge`.

    What merging rounded stays rounded: with ``--dtype float32`` on both ways the base comes back to fp32 precision.
    """
    refuse_existing(directory)
    whole = read_whole(source)
    adapter = read_adapter(taken_out, whole.model)
    require_reversible(adapter.pet)
    weights = unmerged(adapter.model(whole.model), whole.weights, adapter.weights)
    return _export(directory, whole, weights, options, progress)


def _export(
    directory: Path, whole: Whole, weights: Mapping[str, TensorSource], options: Mapping[str, Any], progress: Progress
) -> Path:
    tokenizer: Tokenizer | None = None if whole.tokenizer is None else load_tokenizer(whole.tokenizer)
    sources = watched("writing", weights, progress)
    return export_hugging_face(directory, whole.model, sources, tokenizer=tokenizer, **options)


def _named_base(source: Path) -> Path:
    if is_peft(source):
        path = str(read_json(source / CONFIG_FILE).get("base_model_name_or_path") or "")
    else:
        checkpoint = load_checkpoint(source, option="ADAPTER", with_optimizer=False, read=stored_tensors)
        path = (Base.of(checkpoint.state) or Base("", "")).path
    if not path or not Path(path).exists():
        where = f"its base {path} is not a directory here" if path else "it does not say its base"
        raise UserError(f"{source}: {where}; give --base DIRECTORY")
    return Path(path)
