"""The device of a run: environment variables before MindSpore is imported, its context afterwards."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.process.exit_hooks import when_leaving
from mindllm.process.temporary import make_temporary, remove_temporary
from mindllm.train.job.ranks import SINGLE_RANK, Ranks

COMPILER_LOG = "dsa_transfrom.log"  # what the fusion's compiler leaves in the working directory
NOTHING = ""


def prepare_environment(config: RunConfig) -> None:
    """Sets what MindSpore and its libraries read once, when they are loaded: call it before MindSpore is imported.

    Raises:
        UserError: graph-kernel fusion is asked for where it cannot run.
    """
    os.environ.setdefault("GLOG_v", "3")
    if config.run_mode in ("predict", "chat"):
        # Threads of the kernels meet some 200 times for a token. Where other processes want their cores, those that wait for each
        # other by spinning take away what the others need to arrive: a tenth of the speed.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.update(saved_graphs_environment(config, Path(config.context.save_graphs_path)))
    if uses_graph_kernels(config):
        directory = cache_directory(config) if config.context.compile_cache else _temporary_directory()
        rounds = config.model.config.compute_dtype != "float32"
        os.environ.update(graph_kernel_environment(directory, fuse_casts=not rounds))


def saved_graphs_environment(config: RunConfig, directory: Path) -> dict[str, str]:
    """Returns the environment of a process that writes graphs into ``directory``, if ``save_graphs`` asks for it.

    Where ranks communicate, MindSpore puts those of rank 3 into ``rank_3`` inside.
    """
    level = int(config.context.save_graphs)
    return {"MS_DEV_SAVE_GRAPHS": str(level), "MS_DEV_SAVE_GRAPHS_PATH": str(directory.absolute())} if level else {}


def cache_directory(config: RunConfig) -> Path:
    """The compile cache of this process: each of several ranks has its own, or one would load what another is writing."""
    directory = config.compile_cache_directory
    several = config.parallel_config.device_num > 1
    return directory / f"rank_{os.environ.get('RANK_ID', '0')}" if several else directory


def graph_kernel_environment(directory: Path, fuse_casts: bool = True) -> dict[str, str]:
    """Returns the environment of a process that fuses elementwise operators into kernels of its own, kept in ``directory``.

    The fusion's code generator for CPU knows fp32 alone, so where other types occur conversions stay operators of their own
    (``fuse_casts``). OpenMP has one thread, because its idle threads spin and take the cores from MindSpore's own pool: the
    step takes three times as long with two.
    """
    flags = "--opt_level=2" if fuse_casts else "--opt_level=2 --disable_cluster_ops=Cast"
    return {
        "MS_DEV_GRAPH_KERNEL_FLAGS": flags,
        "MS_COMPILER_CACHE_PATH": str(Path(directory).absolute()),  # kernels go into its akg_kernel_meta
        "AKG_WHITE_LIST_PATH": "/",  # or the compiler reminds of it in a line per kernel
        "OMP_NUM_THREADS": "1",
    }


def uses_graph_kernels(config: RunConfig) -> bool:
    """Whether elementwise operators are fused. On CPU ``auto`` means: where ``decorator`` and a C++ compiler are installed.

    Not for predictions: the few tokens a step has gain nothing, and every new length would wait for kernels of its own.
    """
    wish = config.context.enable_graph_kernel
    if config.context.device_target != "CPU":
        return wish is True
    missing = missing_for_graph_kernels()
    if wish is True and missing:
        raise config.error("context.enable_graph_kernel", f"fusion on CPU needs {missing}; install it, or write auto")
    if wish == "auto" and config.run_mode in ("predict", "chat"):
        return False
    return wish is not False and not missing


def missing_for_graph_kernels() -> str:
    """Names what graph-kernel fusion on CPU needs and this machine lacks; empty where it can run."""
    if importlib.util.find_spec("decorator") is None:
        return "the Python package decorator"
    if shutil.which("g++") is None:
        return "the C++ compiler g++"
    return NOTHING


def set_up_device(config: RunConfig) -> None:
    """Selects the device of a process that is alone."""
    select_device(config, SINGLE_RANK)


def select_device(config: RunConfig, ranks: Ranks) -> None:
    """Selects the device of this process and the graph compiler's settings."""
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
    """Lets the ranks reach each other; call it when the device is selected."""
    if ranks.count > 1:
        from mindspore.communication import init

        init()


def _device_id(config: RunConfig, ranks: Ranks) -> int:
    """The device of this process: of several, the one that the launcher has given it."""
    return config.context.device_id if ranks.count == 1 else int(os.environ.get("DEVICE_ID", "0"))


def _temporary_directory() -> Path:
    directory = make_temporary("mindllm-kernels-")
    when_leaving(remove_temporary, directory)
    return directory


def peak_memory(config: RunConfig) -> int | None:
    """Bytes that the memory pool of this rank's device has taken at most; None on a CPU, which has none.

    No device was at hand: this was never run on one.
    """
    if config.context.device_target == "CPU":
        return None
    import mindspore as ms

    return int(ms.runtime.max_memory_reserved())


def used_peak_memory(config: RunConfig) -> int | None:
    """Bytes that tensors of this rank have taken of its device at most, without gaps between them; None on a CPU.

    It is what MindSpore's dry run calls "Used peak memory usage". No device was at hand: this was never run on one.
    """
    if config.context.device_target == "CPU":
        return None
    import mindspore as ms

    return int(ms.runtime.max_memory_allocated())
