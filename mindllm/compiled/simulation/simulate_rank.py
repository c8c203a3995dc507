"""``simulate_rank(config, rank)``: MindSpore's own dry run of any rank's training step, on a machine without a device."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mindllm.compiled.device.callback_thread import calm_callback_thread
from mindllm.compiled.device.debug_information import can_leave_out_lines, leave_out_lines
from mindllm.compiled.device.front_end import environment
from mindllm.compiled.device.parsed_sources import write_parsed
from mindllm.compiled.device.stand_in import device_software
from mindllm.compiled.graph.sources import Sources
from mindllm.compiled.rank.compile_rank import (
    PARSED,
    TEXT_DIRECTORY,
    failure_of,
    last_error,
    sources_in,
    text_of_last_graph,
)
from mindllm.compiled.rank.compile_rank import (
    learn as learn,
)
from mindllm.compiled.rank.compile_rank import (
    prepare as prepare,
)
from mindllm.compiled.simulation.memory_tracker import BLOCKS, read_tracked
from mindllm.compiled.simulation.simulation import Simulation
from mindllm.config import RunConfig, load_config, tree_of
from mindllm.errors import UserError
from mindllm.jobs import worker
from mindllm.jobs.cores import Core
from mindllm.jobs.environment import allocation_variables
from mindllm.jobs.memory import free_memory
from mindllm.jobs.pool import Outcome, Task, run_task
from mindllm.parallel.layout import mesh_of
from mindllm.parallel.refusals import CompileFailed, refusals_explained
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


PRELOAD = __name__
PIPELINED_THREADS = 8  # with one thread, the default on two cores, kernels cannot be launched in branches
# O1 fuses elementwise operators and leaves used peaks as they are (docs/simulation.md); O2 needs GE, a part of CANN.
KERNEL_BY_KERNEL = "O0"
UNLIMITED_MEMORY = "4000GB"


def server_environment() -> dict[str, str]:
    """Return the variables of a server whose forks simulate.

    Raises:
        StandInUnavailable: this machine cannot simulate a device.
    """
    return {**ENVIRONMENT, **allocation_variables(), **device_software()}


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


def simulate_rank(config: RunConfig, rank: int, timeout: float = 3600.0, whole: bool = False) -> Simulation:
    """Run the training step of global ``rank`` in MindSpore's dry run, in a process of its own.

    Args:
        timeout: seconds.
        whole: also compile all layers of other stages, as they are, which changes nothing but the time (see
            ``reduce_other_stages`` and ``mindllm/parallel/thin_layers.py``).

    Raises:
        UserError: the rank does not exist, the target is not an Ascend device, or this machine cannot simulate one.
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
        output = _run_step(run, rank, directory, timeout, whole)
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


def source_lines(config: RunConfig, rank: int, timeout: float = 3600.0) -> Sources:
    """Return the source lines of the operators of ``rank``, whose graph is compiled by the front end only.

    Raises what :func:`simulate_rank` raises.
    """
    with temporary_directory("mindllm_lines_") as directory:
        variables = {**environment(rank, mesh_of(config).device_num), **text_of_last_graph(directory)}
        _run_once(config, rank, directory, timeout, f"compiling rank {rank}", variables, with_lines=True)
        return sources_in(Path(variables[TEXT_DIRECTORY]) / f"rank_{rank}")


def _run_step(config: RunConfig, rank: int, directory: Path, timeout: float, whole: bool) -> str:
    """Simulate ``rank`` inside ``directory``, and return what MindSpore printed.

    The step is compiled without lines of the source, which is faster. If that fails, it is compiled again with them and with
    whole layers, so that an error names its line; if the second attempt succeeds, the output ends with the first error.
    """
    name, product = f"simulating rank {rank}", directory / f"rank_{rank}" / BLOCKS
    outcome = _run_once(config, rank, directory, timeout, name, {}, whole, may_fail=True)
    output = outcome.log.read_text(encoding="utf-8", errors="replace")
    if outcome.code:
        error = last_error(output).partition("\n[")[0]
        outcome.log.unlink()
        outcome = _run_once(config, rank, directory, timeout, name, {}, whole=True, with_lines=True)
        output = outcome.log.read_text(encoding="utf-8", errors="replace")
        output = f"{output}\ncompiled twice, the second time with lines of the source: {' '.join(error.split())}"
    if not product.is_file():
        raise CompileFailed(f"{name} left no {product.relative_to(directory)}:\n{last_error(output)}")
    return output


def _run_once(
    config: RunConfig,
    rank: int,
    directory: Path,
    timeout: float,
    name: str,
    variables: Mapping[str, str],
    whole: bool = False,
    with_lines: bool = False,
    may_fail: bool = False,
) -> Outcome:
    """Run :func:`simulate_alone` in a process of its own; raise the error of one that fails, unless it ``may_fail`` by itself."""
    free, parsed = free_memory(), (worker.task_directory or directory) / PARSED
    arguments = (tree_of(config), rank, str(directory), str(parsed), whole, with_lines)
    task = Task(name, f"{__name__}:simulate_alone", arguments, None, 0, 1, directory, variables, timeout)
    outcome = run_task(task, PRELOAD, server_environment())
    if outcome.code is None or outcome.code < 0 or (outcome.code and not may_fail):
        raise failure_of(outcome, free)
    return outcome


def simulate_alone(tree: dict[str, Any], rank: int, directory: str, parsed: str, whole: bool, with_lines: bool) -> None:
    """Simulate a rank inside ``directory``, and write what was parsed: a task."""
    gc.disable()  # the process ends before its garbage matters, and collecting it takes time
    config = load_config(tree)
    if worker.task_directory == Path(directory):  # otherwise the task that started this one has a core
        Core()
    os.environ.update({"RANK_ID": str(rank), "RANK_SIZE": str(mesh_of(config).device_num)})
    os.chdir(directory)
    if not with_lines and can_leave_out_lines(config):
        leave_out_lines()
    simulate(config, rank, whole)
    write_parsed(Path(parsed))


def simulate(config: RunConfig, rank: int, whole: bool = False) -> None:
    """Run one step of ``rank``. Its results are in the files and lines that MindSpore writes.

    ``whole``: the layers of other stages are compiled as they are.
    """
    import mindspore as ms
    from mindspore.communication import init
    from mindspore.communication._comm_helper import GlobalComm
    from mindspore.nn.utils import no_init_parameters

    context = config.context
    GlobalComm.CHECK_ENVS = False
    ms.set_context(device_target="Ascend", max_device_memory=UNLIMITED_MEMORY, mode=ms.GRAPH_MODE)
    ms.set_context(jit_config={"jit_level": KERNEL_BY_KERNEL}, memory_optimize_level=context.memory_optimize_level)
    ms.set_recursion_limit(context.max_call_depth)
    ms.runtime.dispatch_threads_num(PIPELINED_THREADS)
    init()
    from mindllm.train.distributed_step import build_distributed_step, example_inputs

    calm_callback_thread(Path(ms.__file__).parent)
    alone = config.parallel_config.device_num == 1
    # On one device weights would be drawn as soon as they are made. Elsewhere they are made when they are cut; what
    # no_init_parameters leaves on the class makes MindSpore 2.10 fill them on the host instead.
    with no_init_parameters() if alone else nullcontext():
        if alone and config.runner_config.gradient_accumulation_steps > 1:
            calls = _part_by_part(config)
        else:
            calls = [(build_distributed_step(config, rank, alone=not whole, balanced=True), example_inputs(config))]
    for cell, inputs in calls:
        leave_uninitialised(cell.get_parameters())
        with refusals_explained(cell):
            cell(*inputs)
    ms.runtime.synchronize()


def _part_by_part(config: RunConfig) -> list[tuple[Any, Sequence[Any]]]:
    """Return cells and inputs of a step on one device that accumulates gradients: a graph for a part, and one for the end.

    One part represents several. It comes last, because optimizer state is not on the device when it is first called.
    """
    from mindllm.models.attention.largest_logit import largest_logits
    from mindllm.models.weights import shares_of
    from mindllm.parallel import build_replica
    from mindllm.parallel.context import input_columns
    from mindllm.train.distributed_step import example_inputs
    from mindllm.train.engine.columns import inputs, optional_inputs
    from mindllm.train.engine.replica import accumulating_cells
    from mindllm.train.optimizers.build import make_optimizer

    model = build_replica(config)
    optimizer = make_optimizer(model.trainable_params(), config, shares=shares_of(model), largest=largest_logits(model))
    accumulate, end = accumulating_cells(config, model, optimizer)
    columns = input_columns(config)
    given = example_inputs(config)
    parts = config.runner_config.gradient_accumulation_steps
    batch = {name: values.asnumpy()[: len(values) // parts] for name, values in zip(columns, given, strict=False)}
    rate, scale, *last = given[len(columns) :]
    return [(end, (rate, scale, *last)), (accumulate, (*inputs(batch), scale, *optional_inputs(batch)))]


def leave_uninitialised(parameters: Iterable[Any]) -> None:
    """Weights become zeros: memory of the host that nobody touches, so it is never really taken."""
    from mindspore.common.initializer import Zero

    for parameter in parameters:
        if parameter.has_init:
            parameter.init_mode.init = Zero()


def unknown_lines(output: str) -> list[str]:
    """Return MindSpore's output without lines known to be harmless, and one line for each place."""
    known, place = re.compile("|".join(KNOWN)), re.compile(r"\[mindspore/\S+\]")
    first: dict[str, str] = {}
    for line in output.splitlines():
        if not known.search(line):
            first.setdefault(found[0] if (found := place.search(line)) else line, line)
    return list(first.values())
