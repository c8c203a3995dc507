"""``simulate_rank(config, rank)``: MindSpore's own dry run of any rank's training step, on a machine without a device."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from mindllm.compiled.device.stand_in import device_software
from mindllm.compiled.rank.compile_rank import CONFIG
from mindllm.compiled.rank.worker_process import run_worker
from mindllm.compiled.simulation.memory_tracker import read_tracked
from mindllm.compiled.simulation.simulation import Simulation
from mindllm.config import RunConfig, render_config
from mindllm.errors import UserError
from mindllm.parallel.layout import mesh_of
from mindllm.parallel.refusals import CompileFailed
from mindllm.process.temporary import temporary_directory
from mindllm.reduced_runs.stage import reduce_other_stages

DEVICE_MEMORY = 64 << 30  # an Ascend 910B
ENVIRONMENT = {
    "MS_SIMULATION_LEVEL": "1",
    "MS_ALLOC_CONF": "memory_tracker:True",
    "GLOG_v": "2",
}
KNOWN = (
    r"_check_version\.py",  # Ascend's version and Python packages, which the stand-ins do not have
    r"Current cann does not support mstx",
    r"This is simulation mode|InitializeDummyCommLib|CreateCommunicationGroup|CreateSimulationGroup",
    r"Pipeline Parallel with no 'lazy_inline' is deprecated",  # said where there is no pipeline
    r"Enable less mem vpp status",
    r"ShardOptGroup",  # a weight that no optimizer slices are made of, as where there is one replica
    r"ComputeThreadNums|have been set recomputed, the node would not be handled",
    r"mem_tracker\.cc|tracker_graph\.cc|ascend_memory_adapter\.cc",
    r"^Device MOC|^MindSpore (Used|memory)|^(Used|Actual) peak|^\[MS_\w+\]|^\s*$",
    r"will be deprecated and removed",
    r"[Ff]ailed to receive tensor|acltdtReceiveTensor",
    r"Event base dispatch success",
)
logger = logging.getLogger(__name__)


RunProcess = Callable[[RunConfig, int, Path, float, bool], str]
"""Simulates a rank in a process of its own, which leaves MindSpore's files in a directory; returns what it printed. Of
configuration, rank, directory, the most seconds it may take, and whether the layers of other stages are whole."""


def simulate_in_new_process(config: RunConfig, rank: int, directory: Path, timeout: float, whole: bool = False) -> str:
    """Simulate in a new Python, with the device software in its environment; what is refused once more, with whole layers."""
    (directory / CONFIG).write_text(render_config(config), encoding="utf-8")
    try:
        return _in_new_process(config, rank, directory, timeout, whole)
    except CompileFailed:
        if whole:
            raise
    return _in_new_process(config, rank, directory, timeout, whole=True)


def _in_new_process(config: RunConfig, rank: int, directory: Path, timeout: float, whole: bool) -> str:
    return run_worker(
        "mindllm.compiled.simulation.simulate_worker",
        ["--config", CONFIG, "--rank", str(rank), *["--whole"] * whole],
        directory,
        {**ENVIRONMENT, **device_software(), **rank_environment(config, rank)},
        product=product_of(rank),
        doing=f"simulating rank {rank}",
        timeout=timeout,
    )


def rank_environment(config: RunConfig, rank: int) -> dict[str, str]:
    """Return what tells MindSpore which rank it is."""
    return {"RANK_ID": str(rank), "RANK_SIZE": str(mesh_of(config).device_num)}


def product_of(rank: int) -> str:
    """Return the file that a simulation leaves when it has ended well."""
    return f"rank_{rank}/memory_block.csv"


def check_simulated(config: RunConfig) -> None:
    """Refuse what MindSpore's dry run is not of, before anything is compiled.

    Accumulated gradients that stay whole are used by an update that is a graph of its own (``ReusedOptimizer``), which is called
    where numbers are finite. MindSpore 2.10's back end has no kernel for such a call within a branch (``CallInline``): "The
    pointer[ker_ptr] is null".

    Raises:
        UserError: another device than Ascend, or such a run.
    """
    target, sizes, steps = config.context.device_target, config.parallel_config, config.runner_config
    if target != "Ascend":
        raise config.error("context.device_target", f"only Ascend devices are simulated (value {target}); write Ascend")
    accumulates = steps.gradient_accumulation_steps > 1 and sizes.pipeline_stage == 1 and sizes.device_num > 1
    if accumulates and not config.parallel.enable_parallel_optimizer:
        raise config.error(
            "parallel.enable_parallel_optimizer",
            "MindSpore 2.10's back end cannot build a step that accumulates gradients which stay whole on every device (value "
            f"false); write true, or runner_config.gradient_accumulation_steps 1 in place of {steps.gradient_accumulation_steps}",
        )


def simulate_rank(
    config: RunConfig,
    rank: int,
    timeout: float = 3600.0,
    whole: bool = False,
    run_process: RunProcess = simulate_in_new_process,
) -> Simulation:
    """Runs the training step of global ``rank`` in MindSpore's dry run, in a process of its own.

    Args:
        timeout: seconds.
        whole: also compiles all layers of other stages, as they are, which changes nothing but the time (see
            ``reduce_other_stages`` and ``mindllm/parallel/thin_layers.py``).
        run_process: what runs that process.

    Raises:
        UserError: the rank does not exist, the target is no Ascend device, or this machine cannot simulate one.
        CompileFailed: the compiler's own error.
    """
    mesh = mesh_of(config)
    if not 0 <= rank < mesh.device_num:
        raise UserError(
            f"rank {rank} does not exist: the configuration has {mesh.device_num} devices, 0 to {mesh.device_num - 1}"
        )
    check_simulated(config)
    run, rename = (config, str) if whole else reduce_other_stages(config, mesh.stage_of(rank))
    with temporary_directory("mindllm_simulate_") as directory:
        output = run_process(run, rank, directory, timeout, whole)
        tracked = read_tracked(directory / f"rank_{rank}", rename)
    messages = tuple(unknown_lines(output))
    for message in messages:
        logger.warning("MindSpore, rank %d: %s", rank, message)
    return Simulation(
        rank=rank,
        stage=mesh.stage_of(rank),
        device_memory=DEVICE_MEMORY,
        limit=config.context.device_memory,
        used_peak=tracked.used_peak,
        actual_peak=tracked.actual_peak,
        blocks=tracked.blocks,
        tasks=tracked.tasks,
        collectives=tracked.collectives,
        messages=messages,
        planned=tracked.planned,
    )


def unknown_lines(output: str) -> list[str]:
    """What MindSpore printed, without lines that are known to be harmless; of those from one place the first."""
    known, place = re.compile("|".join(KNOWN)), re.compile(r"\[mindspore/\S+\]")
    first: dict[str, str] = {}
    for line in output.splitlines():
        if not known.search(line):
            first.setdefault(found[0] if (found := place.search(line)) else line, line)
    return list(first.values())
