"""What is known to fail before MindSpore is imported: paths that cannot be written, and sizes this machine does not have."""

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
STATE = 4  # copies of a weight in training: itself, its gradient, two moments of AdamW
KERNELS = 16 * MIB  # of a small model 2 MB were seen
CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def check_preconditions(config: RunConfig) -> None:
    """Raises UserError for the first path that cannot be written, and for a run that needs more memory than there is."""
    for key, path, is_directory in _written(config):
        if why := obstacle(path, directory=is_directory):
            raise config.error(key, f"{path}: {why}")
    _refuse_no_room_for_kernels(config)
    devices = config.parallel_config.device_num
    if config.context.device_target != "CPU" or devices != int(os.environ.get("MS_WORKER_NUM", "1")):
        return  # no replicas on CPUs: what executes the run knows its own needs
    parts, memory = least_bytes(config), machine_bytes()
    if sum(parts.values()) > memory:
        shares = ", ".join(f"{name} {size / GB:,.1f} GB" for name, size in parts.items())
        raise UserError(
            f"{config.source}: this run needs at least {sum(parts.values()) / GB:,.1f} GB of memory ({shares}), and this "
            f"machine has {memory / GB:,.1f} GB; make the largest of them smaller"
        )


def _refuse_no_room_for_kernels(config: RunConfig) -> None:
    """On a full disk MindSpore's server of kernels neither compiles nor ends, and a run would wait for it without end."""
    context = config.context
    if config.run_mode not in ("train", "finetune") or not context.compile_cache:
        return
    directory = config.compile_cache_directory
    free = shutil.disk_usage(next(path for path in (directory, *directory.absolute().parents) if path.exists())).free
    if free < KERNELS:
        key = "context.compile_cache_path" if context.compile_cache_path else "output_dir"
        raise config.error(
            key,
            f"{directory}: {free / MIB:.1f} MB are free, and compiled kernels take up to {KERNELS / MIB:.0f} MB there; free "
            "some, or write where there is room",
        )


def _written(config: RunConfig) -> Iterator[tuple[str, str, bool]]:
    """Key, path, and whether it is a directory, of what this mode writes."""
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


def least_bytes(config: RunConfig) -> dict[str, int]:
    """Memory that a run on CPUs takes at least, by what fills it; all its processes together.

    Training keeps the input of every layer and, for a moment, the logits of a slice of the loss. Generation keeps keys and
    values of as many tokens as the model works on.
    """
    model, processes = config.model.config, config.parallel_config.device_num
    trains = config.run_mode in ("train", "finetune")
    parts = {"weights": model.parameter_count() * FLOAT32 * processes}
    if trains:
        trained = model.architecture.trained_parameter_count() * FLOAT32 * processes
        parts = {"weights, gradients and optimizer state": parts["weights"] + trained * (STATE - 1)}
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
    """Memory of this machine, or of the control group this process is in, with nothing else running."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTROL_GROUP.read_text(encoding="ascii").strip() if CONTROL_GROUP.is_file() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine
