"""The compiled training step on disk, so that the next start of the same run loads it instead of compiling.

MindSpore numbers the graphs it keeps and checks little more than the script that was started. So one directory holds the
graphs of one step only, and is named by all that the step depends on: configuration, sources, versions.

With graph-kernel fusion only the fused kernels are kept (``MS_COMPILER_CACHE_PATH``, see ``device``): a loaded graph names
the same kernels differently, so the first start from it would compile them all again, which takes longer than the graph.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms

from mindllm.config import RunConfig
from mindllm.sources import PACKAGE
from mindllm.train.device import cache_directory, uses_graph_kernels

PREFIX = "step-"
"""Keys that are constants of the graph with a tuner: the draws of layers, the schedule of ranks."""
NOT_COMPILED = (
    "seed",
    "output_dir",
    "load_checkpoint",
    "load_adapter",
    "adapter_id",
    "pretrained_model_dir",
    "resume_training",
    "overwrite",
    "require_proof",
    "do_eval",
    "eval_step_interval",
    "profile",  # and all that begin with it
    "with_stack",
    "trainer.",
    "runner_config.epochs",
    "runner_config.train_steps",
    "runner_config.stop_step",
    "runner_config.step_timeout",
    "runner_config.slow_rank_factor",
    "context.device_id",
    "context.lockstep_step_seconds",
    "context.compile_cache",  # and its path
    "lr_schedule",  # a rate is an input of the step
    "train_dataset.",  # but for the columns of a batch, and pairs of answers
    "preference.",  # unless pairs are learned from
    "eval_dataset.",
    "eval_tasks",
    "evaluation.",
    "processor.",
    "generation.",
    "input_data",
    "predict_batch_size",
    "save_file",
    "export_hf.",
    "callbacks",
)
"""Beginnings of dotted keys that change between starts of one run and leave its step as it is, as a test shows of each."""


@contextlib.contextmanager
def cached_compilation(config: RunConfig) -> Iterator[None]:
    """Graphs that are compiled for the first time inside are loaded from the cache or put there, whole or not at all."""
    if not config.context.compile_cache or config.context.save_graphs or uses_graph_kernels(config):
        yield
        return
    root = cache_directory(config).absolute()
    kept = root / (PREFIX + step_key(config))
    directory = kept if kept.is_dir() else kept.with_name(f".{kept.name}.{os.getpid()}")
    directory.mkdir(parents=True, exist_ok=True)
    ms.set_context(enable_compile_cache=True, compile_cache_path=str(directory))
    try:
        yield
        if directory != kept:
            _keep(directory, kept)
    finally:
        ms.set_context(enable_compile_cache=False, compile_cache_path=str(root))
        if directory != kept:
            shutil.rmtree(directory, ignore_errors=True)


def _keep(directory: Path, kept: Path) -> None:
    """Gives a finished directory its name; those of other configurations go, a run has one."""
    for other in kept.parent.glob(f"{PREFIX}*"):
        shutil.rmtree(other, ignore_errors=True)
    with contextlib.suppress(OSError):  # another process was faster
        directory.rename(kept)


def step_key(config: RunConfig) -> str:
    """Returns a hash of what a compiled step depends on: the configuration (:func:`compiled_keys`), sources, versions."""
    text = json.dumps([compiled_keys(config), ms.__version__], sort_keys=True, default=str)
    return hashlib.sha256(text.encode() + sources_digest()).hexdigest()[:16]


@functools.cache
def sources_digest() -> bytes:
    """Returns a hash of all sources of the package."""
    digest = hashlib.sha256()
    for source in sorted(PACKAGE.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()


def compiled_keys(config: RunConfig) -> dict[str, Any]:
    """Returns all keys of ``config`` by dotted name, but those of :data:`NOT_COMPILED`; of the data what its batches hold.

    A key that is new in the schema counts until it is shown not to.
    """
    pet = config.model.config.pet_config
    constants = pet.tuner.constants if pet is not None else ()
    keys = {
        name: value
        for name, value in flat_keys(config.model_dump(mode="json"))
        if name in constants or not name.startswith(NOT_COMPILED)
    }
    loss = config.preference.model_dump(mode="json") if config.is_preference_tuning else None
    return keys | {"columns": config.train_dataset.document_columns, "pairs": loss}


def flat_keys(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings with their dotted names; a list, or an empty mapping, is a leaf."""
    if not isinstance(tree, dict) or not tree:
        yield path, tree
        return
    for key, value in tree.items():
        yield from flat_keys(value, f"{path}.{key}" if path else str(key))
