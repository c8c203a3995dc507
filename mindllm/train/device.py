"""Device setup of a run: environment variables before MindSpore is imported, its context afterwards."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.process.exit_hooks import when_leaving
from mindllm.process.temporary import make_temporary, remove_temporary
from mindllm.train.job.ranks import SINGLE_RANK, Ranks

COMPILER_LOG = "dsa_transfrom.log"  # written to the working directory by the graph-kernel compiler


def prepare_environment(config: RunConfig) -> None:
    """Set environment variables that MindSpore and its libraries read at import. Call it before MindSpore is imported.

    Raises:
        UserError: graph-kernel fusion is requested but cannot run on this machine.
    """
    os.environ.setdefault("GLOG_v", "3")
    if config.run_mode in ("predict", "chat"):
        # Kernel threads synchronize about 200 times per token. On a busy machine, spinning threads take the cores that the others
        # need, which makes generation ten times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.update(saved_graphs_environment(config, Path(config.context.save_graphs_path)))
    if uses_graph_kernels(config):
        directory = cache_directory(config) if config.context.compile_cache else _temporary_directory()
        rounds = config.model.config.compute_dtype != "float32"
        os.environ.update(graph_kernel_environment(directory, fuse_casts=not rounds))


def saved_graphs_environment(config: RunConfig, directory: Path) -> dict[str, str]:
    """Return environment variables that make MindSpore save graphs into ``directory``; empty without ``save_graphs``.

    In a job of several ranks MindSpore appends ``rank_N``.
    """
    level = int(config.context.save_graphs)
    return {"MS_DEV_SAVE_GRAPHS": str(level), "MS_DEV_SAVE_GRAPHS_PATH": str(directory.absolute())} if level else {}


def cache_directory(config: RunConfig) -> Path:
    """Return the compile cache directory of this process. Each rank has its own, so that none reads a partial entry."""
    directory = config.compile_cache_directory
    several = config.parallel_config.device_num > 1
    return directory / f"rank_{os.environ.get('RANK_ID', '0')}" if several else directory


def graph_kernel_environment(directory: Path, fuse_casts: bool = True) -> dict[str, str]:
    """Return environment variables that enable graph-kernel fusion, with compiled kernels in ``directory``.

    The CPU code generator supports fp32 only, so casts are not fused if other types occur (``fuse_casts``). OpenMP gets one
    thread: its idle threads spin and take cores from MindSpore's pool, which makes a step three times slower with two.
    """
    flags = "--opt_level=2" if fuse_casts else "--opt_level=2 --disable_cluster_ops=Cast"
    return {
        "MS_DEV_GRAPH_KERNEL_FLAGS": flags,
        "MS_COMPILER_CACHE_PATH": str(Path(directory).absolute()),  # kernels go into its akg_kernel_meta
        "AKG_WHITE_LIST_PATH": "/",  # avoids a warning per kernel
        "OMP_NUM_THREADS": "1",
    }


def uses_graph_kernels(config: RunConfig) -> bool:
    """Return True if elementwise operators are fused. On CPU ``auto`` requires ``decorator`` and a C++ compiler.

    Predictions are not fused with ``auto``: few tokens gain nothing, and every new length would compile kernels.

    Raises:
        UserError: fusion is requested but cannot run on this machine.
    """
    setting = config.context.enable_graph_kernel
    if config.context.device_target != "CPU":
        return setting is True
    missing = missing_for_graph_kernels()
    if setting is True and missing:
        raise config.error(
            "context.enable_graph_kernel", f"fusion on CPU requires {missing}; install it, or write auto"
        )
    if setting == "auto" and config.run_mode in ("predict", "chat"):
        return False
    return setting is not False and not missing


def missing_for_graph_kernels() -> str:
    """Return what is missing on this machine for graph-kernel fusion on CPU; empty if nothing is."""
    if importlib.util.find_spec("decorator") is None:
        return "the Python package decorator"
    if shutil.which("g++") is None:
        return "the C++ compiler g++"
    return ""


def set_up_device(config: RunConfig) -> None:
    """Select the device of a single process."""
    select_device(config, SINGLE_RANK)


def select_device(config: RunConfig, ranks: Ranks) -> None:
    """Select the device of this process and configure MindSpore's context."""
    import mindspore as ms

    context = config.context
    ms.set_device(context.device_target, _device_id(config, ranks))
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": context.jit_config.jit_level})
    ms.set_recursion_limit(context.max_call_depth)
    if context.device_target == "Ascend":
        ms.runtime.set_memory(max_size=context.max_device_memory, optimize_level=context.memory_optimize_level)
    elif context.runtime_num_threads is not None:
        ms.device_context.cpu.op_tuning.threads_num(context.runtime_num_threads)
    if config.train_precision_sync:
        ms.set_deterministic(True)
    if uses_graph_kernels(config) and not Path(COMPILER_LOG).exists():
        when_leaving(Path(COMPILER_LOG).absolute().unlink, missing_ok=True)


def connect(ranks: Ranks) -> None:
    """Initialize communication between ranks. Call it after :func:`select_device`."""
    if ranks.count > 1:
        from mindspore.communication import init

        init()


def _device_id(config: RunConfig, ranks: Ranks) -> int:
    """Return the device of this process; in a job, the one assigned by the launcher."""
    return config.context.device_id if ranks.count == 1 else int(os.environ.get("DEVICE_ID", "0"))


def _temporary_directory() -> Path:
    directory = make_temporary("mindllm-kernels-")
    when_leaving(remove_temporary, directory)
    return directory


def peak_memory(config: RunConfig) -> int | None:
    """Return the largest size in bytes of the device's memory pool; None on a CPU. This has not been run on a device."""
    if config.context.device_target == "CPU":
        return None
    import mindspore as ms

    return int(ms.runtime.max_memory_reserved())


def used_peak_memory(config: RunConfig) -> int | None:
    """Return the peak in bytes of tensors on the device, without fragmentation; None on a CPU.

    MindSpore's dry run calls it "Used peak memory usage". This has not been run on a device.
    """
    if config.context.device_target == "CPU":
        return None
    import mindspore as ms

    return int(ms.runtime.max_memory_allocated())
