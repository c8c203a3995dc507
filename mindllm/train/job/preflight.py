"""Checks before MindSpore is imported: paths that cannot be written, and memory that this machine does not have."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.files import obstacle
from mindllm.units import GB, MIB

FLOAT32 = 4
TRAINING_COPIES = 4  # weight, gradient and the two moments of AdamW
KERNEL_BYTES = 16 * MIB  # compiled kernels of a run; a small model needs 2 MB
CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def check_preconditions(config: RunConfig) -> None:
    """Raise if an output path cannot be written, or the run needs more memory than this machine has.

    Raises:
        UserError: names the first problem.
    """
    for key, path, is_directory in _output_paths(config):
        if problem := obstacle(path, directory=is_directory):
            raise config.error(key, f"{path}: {problem}")
    _check_kernel_space(config)
    devices = config.parallel_config.device_num
    if config.context.device_target != "CPU" or devices != int(os.environ.get("MS_WORKER_NUM", "1")):
        return  # only replicas on CPUs; other engines check their memory themselves
    parts, memory = min_memory_parts(config), machine_bytes()
    if sum(parts.values()) > memory:
        shares = ", ".join(f"{name} {size / GB:,.1f} GB" for name, size in parts.items())
        raise UserError(
            f"{config.source}: this run needs at least {sum(parts.values()) / GB:,.1f} GB of memory ({shares}), but this "
            f"machine has {memory / GB:,.1f} GB; reduce the largest item"
        )


def _check_kernel_space(config: RunConfig) -> None:
    """Raise if the disk is full: MindSpore's kernel compiler would hang, and the run with it."""
    context = config.context
    if config.run_mode not in ("train", "finetune") or not context.compile_cache:
        return
    directory = config.compile_cache_directory
    free = shutil.disk_usage(next(path for path in (directory, *directory.absolute().parents) if path.exists())).free
    if free < KERNEL_BYTES:
        key = "context.compile_cache_path" if context.compile_cache_path else "output_dir"
        raise config.error(
            key,
            f"{directory}: {free / MIB:.1f} MB are free, but compiled kernels need up to {KERNEL_BYTES / MIB:.0f} MB; free "
            "space, or use another disk",
        )


def _output_paths(config: RunConfig) -> Iterator[tuple[str, str, bool]]:
    """Yield key, path, and whether it is a directory, for every output of this run mode."""
    trains = config.run_mode in ("train", "finetune")
    if trains or config.run_mode == "eval":
        yield "output_dir", config.output_dir, True
    if trains and config.export_hf.directory:
        yield "export_hf.directory", config.export_hf.directory, True
    if config.context.compile_cache and config.context.compile_cache_path:
        yield "context.compile_cache_path", config.context.compile_cache_path, True
    if config.context.save_graphs:
        yield "context.save_graphs_path", config.context.save_graphs_path, True
    if config.run_mode == "predict" and config.save_file:
        yield "save_file", config.save_file, False


def min_memory_parts(config: RunConfig) -> dict[str, int]:
    """Return a lower bound in bytes of the memory of a run on CPUs, by item, over all its processes.

    Training keeps the input of every layer and the logits of one chunk of the loss. Generation keeps keys and values.
    """
    model, processes = config.model.config, config.parallel_config.device_num
    trains = config.run_mode in ("train", "finetune")
    parts = {"weights": model.parameter_count() * FLOAT32 * processes}
    if trains:
        trained = model.architecture.trained_parameter_count() * FLOAT32 * processes
        parts = {"weights, gradients and optimizer state": parts["weights"] + trained * (TRAINING_COPIES - 1)}
    if config.run_mode in ("predict", "chat"):
        options = config.generation
        rows = max(options.num_beams, options.num_return_sequences) if config.run_mode == "predict" else 1
        length = min(model.seq_length, options.max_new_tokens + 1)
        parts["keys and values"] = 2 * rows * length * model.layer_count * model.n_kv_heads * model.head_dim * FLOAT32
        return parts
    batch = (
        config.runner_config.batch_size if trains else config.eval_dataset.batch_size or config.runner_config.batch_size
    )
    tokens = batch * model.seq_length * processes
    parts["hidden states"] = tokens * model.hidden_size * FLOAT32 * (model.layer_count if trains else 1)
    parts["logits"] = tokens * model.vocab_size * FLOAT32 // model.loss_chunks
    return parts


def machine_bytes() -> int:
    """Return the total memory in bytes of this machine, or of the control group of this process."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTROL_GROUP.read_text(encoding="ascii").strip() if CONTROL_GROUP.is_file() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine
