"""``compile_rank(config, rank)``: the graph of any rank's training step, from MindSpore's own parallel compiler.

The compiler runs in a process of its own, as MindSpore's context is global. That process is a fork of a server which has imported
MindSpore, and in which the sources of the model are parsed once for all ranks: :func:`prepare`, :func:`learn`.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mindllm.compiled.device.front_end import environment
from mindllm.compiled.device.parsed_sources import read_parsed, write_parsed
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.file import load, write_graph
from mindllm.compiled.graph.mind_ir import parameter_names
from mindllm.compiled.graph.sources import SourceLine, read_sources
from mindllm.compiled.rank.host_needs import claimed
from mindllm.config import RunConfig, load_config, tree_of
from mindllm.errors import UserError
from mindllm.jobs.cores import Core
from mindllm.jobs.environment import allocation_variables
from mindllm.jobs.memory import free_memory
from mindllm.jobs.pool import Outcome, Task, run_task
from mindllm.parallel.layout import mesh_of
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.parallel.refusals import CompileFailed, reason, refusals_explained
from mindllm.process.exit_hooks import skip_exit_functions
from mindllm.process.temporary import temporary_directory
from mindllm.train.device import saved_graphs_environment

PRELOAD = __name__
GRAPH, TEXT, PARSED = "rank.graph", "text", "parsed.json"
LAST_PASS = "validate"
TEXT_DIRECTORY = "MS_DEV_SAVE_GRAPHS_PATH"
ERRORS_ONLY = "3"
SHOWN_LINES = 12
USER_ERROR = re.compile(r"^error: ", re.MULTILINE)
OUT_OF_MEMORY = re.compile(r"MemoryError|std::bad_alloc|Cannot allocate memory|[Oo]ut of memory|allocate memory failed")


def prepare() -> None:
    """Import what every rank needs, in the server. MindSpore must not be used there: its threads would not survive a fork."""
    import mindllm.train.distributed_step  # noqa: F401


def learn(directory: Path) -> None:
    """Parse what a task has parsed, in the server, so that later forks find it parsed."""
    if (parsed := directory / PARSED).is_file():
        read_parsed(parsed)


def server_environment() -> dict[str, str]:
    """Return the variables of a server whose forks compile."""
    return {"GLOG_v": ERRORS_ONLY, **allocation_variables(), "MS_DEV_PRECOMPILE_ONLY": "1"}


def compile_rank(config: RunConfig, rank: int, timeout: float = 3600.0) -> CompiledGraph:
    """Compile the training step of global ``rank`` in a process of its own, and return its graph.

    Raises:
        UserError: the rank does not exist, or MindSpore cannot be used for this.
        CompileFailed: the compiler's own error, with the operator it refuses; too little memory; too long a time (seconds).
    """
    devices = mesh_of(config).device_num
    if not 0 <= rank < devices:
        raise UserError(f"rank {rank} does not exist: the configuration has {devices} devices, 0 to {devices - 1}")
    with temporary_directory("mindllm_compile_") as directory, claimed(config):
        graphs = saved_graphs_environment(config, Path(config.context.save_graphs_path) / f"rank_{rank}")
        task = Task(
            f"compiling rank {rank}",
            f"{__name__}:compile_alone",
            (tree_of(config), rank, str(directory)),
            directory=directory,
            environment=graphs or text_of_last_graph(directory),
            timeout=timeout,
        )
        free = free_memory()
        outcome = run_task(task, PRELOAD, server_environment())
        if outcome.code != 0:
            raise failure_of(outcome, free)
        return load(directory / GRAPH)


def compile_alone(tree: dict[str, Any], rank: int, directory: str) -> None:
    """Compile one rank into ``directory``: a task."""
    config = load_config(tree)
    Core()
    os.chdir(directory)
    os.environ.update(environment(rank, mesh_of(config).device_num))
    compile_to(config, rank, Path(directory), balanced=True)
    write_parsed(Path(directory, PARSED))
    skip_exit_functions()


def compile_to(
    config: RunConfig,
    rank: int,
    output: Path,
    training: bool = True,
    choose_rank: Callable[[], int] | None = None,
    balanced: bool = False,
) -> None:
    """Compile the step of ``rank``, or what it evaluates with, and write the graph into the directory ``output``.

    Args:
        choose_rank: called when the compiler needs the rank; returns one that is built as ``rank`` is, whose graph is written.
        balanced: tokens that are sent have the lengths of a router that spreads them evenly, so that all shapes are known.
    """
    from mindllm.compiled.device import front_end

    front_end.pretend_device(rank, mesh_of(config).device_num, choose_rank)
    import mindspore as ms

    from mindllm.compiled.graph.initial import beginnings, initial_values, leave_undrawn
    from mindllm.train.distributed_step import build_distributed_loss, build_distributed_step, example_inputs

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_recursion_limit(config.context.max_call_depth)
    build = partial(build_distributed_step, balanced=balanced) if training else build_distributed_loss
    cell = build(config, rank, tell_rank=choose_rank is None)
    constants = leave_undrawn(cell)
    with refusals_explained(cell):
        graph = front_end.compile_cell(cell, *example_inputs(config, training))
    layouts = {name: ParameterLayout.from_front_end(layout) for name, layout in graph.parameter_layouts.items()}
    layouts |= getattr(cell, "state_layouts", {})
    sources = sources_in(Path(os.environ[TEXT_DIRECTORY]))
    names = parameter_names(graph.mind_ir)
    compiled_rank = ms.get_auto_parallel_context("global_rank") if choose_rank else rank
    initial = initial_values(cell, names, constants)
    begins = beginnings(cell, names, constants)
    write_graph(output / GRAPH, compiled_rank, graph.mind_ir, layouts, sources, initial, begins)


def text_of_last_graph(output: Path) -> dict[str, str]:
    """Return the variables that make MindSpore write its last graph as text, which has the lines of the source."""
    return {
        "MS_DEV_SAVE_GRAPHS": "1",
        TEXT_DIRECTORY: str(output / TEXT),
        "MS_DEV_DUMP_IR_PASSES": LAST_PASS,
    }


def sources_in(text: Path) -> dict[str, tuple[SourceLine, ...]]:
    """Return source lines by scope, from the graphs that MindSpore wrote as text into the directory ``text``."""
    sources: dict[str, tuple[SourceLine, ...]] = {}
    for path in sorted(text.glob(f"*_{LAST_PASS}_*.ir")):
        with open(path, encoding="utf-8", errors="replace") as lines:
            sources |= read_sources(lines)
    return sources


def failure_of(outcome: Outcome, free: str) -> UserError:
    """Return the error of a task that compiled or simulated and has failed; ``free`` is the memory there was at its start."""
    if outcome.code is None:
        return CompileFailed(f"{outcome.task.name} took longer than {outcome.task.timeout:.0f} s")
    log = outcome.log.read_text(encoding="utf-8", errors="replace") if outcome.log.is_file() else ""
    return failure(outcome.code, log, outcome.task.name, free)


def failure(code: int, log: str, name: str, free: str) -> UserError:
    """Return the error of a process that ended with ``code``; ``free`` is the memory that was free at its start, as text."""
    starts = list(USER_ERROR.finditer(log))
    if code == UserError.exit_code and starts:
        message = log[starts[-1].end() :].strip()
        why = reason(log)
        return CompileFailed(f"{name}: {message}\n  reason: {why}") if why else UserError(message)
    if code == -signal.SIGKILL or OUT_OF_MEMORY.search(log):
        how = "the system ended it" if code == -signal.SIGKILL else "an allocation failed"
        return CompileFailed(
            f"{name}: too little memory ({how}; {free} were free when it began); run fewer ranks at a time, close other "
            "programs, or compile fewer layers (model.model_config.num_layers)"
        )
    how = f"exit code {code}" if code >= 0 else f"MindSpore's compiler was ended by {signal.Signals(-code).name}"
    return CompileFailed(f"{name} failed ({how}):\n{last_error(log)}")


def last_error(output: str) -> str:
    """Return the last exception of a traceback, without the stacks that MindSpore adds to it."""
    starts = list(re.finditer(r"^\w*(Error|Exception|Interrupt)\b.*$", output, re.MULTILINE))
    tail = output[starts[-1].start() :] if starts else output
    lines = [line for line in tail.splitlines() if line.strip()]
    return "\n".join(lines[:SHOWN_LINES] if starts else lines[-SHOWN_LINES:])
