"""Run ranks of a program in the dry run: one to learn from, then as many at a time as this machine has memory for.

With all ranks, the program also runs on one device, so that :mod:`mindllm.programs.verify` can compare the ranks with it.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mindllm.compiled.execute.state import whole_shape
from mindllm.dry_run.page import PAGE
from mindllm.errors import RunFailed, UserError, shortened
from mindllm.files import atomic_open
from mindllm.jobs.cores import cores
from mindllm.jobs.memory import MemoryClaim
from mindllm.jobs.process import JobProcess, ending
from mindllm.jobs.worker import POLL_SECONDS
from mindllm.outside import LARGEST_YAML, read_bytes
from mindllm.process.temporary import make_temporary, remove_temporary
from mindllm.programs.command_line import Program, config_of
from mindllm.programs.environment import (
    LOG,
    Report,
    executable_files,
    graph_texts,
    rank_environment,
    read_report,
    read_simulation,
    training_graph,
)
from mindllm.programs.kept import CONFIG, NOT_ALONE, SIMULATION, SINGLE, KeptRank, kept_ranks
from mindllm.programs.lockstep import ExecutableRank, batch_shapes, read_rank
from mindllm.programs.memory import ProgramMemory, RankRun, render
from mindllm.terminal.progress import Progress

STAGES, ALL = "stages", "all"
MESSAGE_LENGTH = 300  # of the program's own error, shortened to this
CANN_PACKAGES = frozenset(
    {
        "acl", "te", "tbe", "hccl", "aclruntime", "auto_tune", "auto_search", "opc_tool", "op_compile_tool", "op_test_frame",
        "schedule_search", "asc_op_compile_base", "ais_bench", "llm_datadist", "dataflow", "mspti", "msprof", "torch_npu",
    }
)  # fmt: skip
MISSING_COMPILER = re.compile(r"Load backend failed")  # MindSpore's message if a program selects GE
STACK = re.compile(r"^\s*-{4,}|^\s*- C\+\+|^\s*$")
FIRST_RANK_BYTES = 1 << 30  # at least, for MindSpore and its dry run of any program
MEMORY_MARGIN = 1.25  # host memory of another rank, as a multiple of the first one's
LARGEST_MODEL = 1 << 28  # elements of all weights that can be executed on a small machine


def simulate(program: Program, ranks: str, keep: Path, workers: int | None, progress: Progress) -> ProgramMemory:
    """Run ranks of a program, and write their results, the program's YAML and a page to ``keep``.

    Args:
        ranks: ``stages``, ``all`` or numbers; see :func:`mindllm.programs.simulate_program`.
    """
    first, choose = _parse_ranks(ranks, program.devices)
    runs = run_ranks(program, first, choose, keep, workers, progress)
    not_alone = None
    if ranks == ALL and program.devices > 1:
        not_alone = run_single(program, keep, runs[0].report.stages, progress)
    keep_config(program.command, keep)
    with atomic_open(keep / PAGE) as page:
        page.write(render(runs, shlex.join(program.command)))
    return ProgramMemory(tuple(runs), not_alone)


def first_rank(ranks: str) -> int:
    """Return the first rank of ``stages``, ``all`` or numbers."""
    return 0 if ranks in (ALL, STAGES) else _rank_numbers(ranks)[0]


def _parse_ranks(ranks: str, devices: int) -> tuple[int, Callable[[Report], Sequence[int]]]:
    """Return the rank to run first, and a function that selects all ranks from its report."""
    if ranks == ALL:
        return 0, lambda report: range(devices)
    if ranks == STAGES:
        return 0, lambda report: range(0, devices, max(1, devices // report.stages))
    numbers = _rank_numbers(ranks)
    if missing := next((number for number in numbers if number >= devices), None):
        raise UserError(f"--ranks {ranks}: no rank {missing} among {devices} devices; write 0 to {devices - 1}")
    return numbers[0], lambda report: numbers


def _rank_numbers(ranks: str) -> list[int]:
    parts = ranks.split(",")
    if not all(part.isdigit() for part in parts):
        raise UserError(f"--ranks {ranks}: write stages, all, or numbers as 0,8,16")
    return [int(part) for part in parts]


def keep_config(command: Sequence[str], keep: Path) -> None:
    """Copy the YAML of the program, which says how the program selects operators."""
    config = config_of(command)
    (keep / CONFIG).unlink(missing_ok=True)
    if config is not None:
        with atomic_open(keep / CONFIG, "wb") as file:
            file.write(read_bytes(config, LARGEST_YAML))


def run_ranks(
    program: Program,
    first: int,
    choose: Callable[[Report], Sequence[int]],
    keep: Path,
    workers: int | None,
    progress: Progress,
) -> list[RankRun]:
    """Run rank ``first``, then the others that ``choose`` selects from its report.

    Raises:
        UserError: a rank ended without a simulated training step. All programs end with this call.
    """
    with MemoryClaim() as claim:
        claim.take(FIRST_RANK_BYTES)
        _remove_ranks(keep, program.devices)
        runs = _run(program, [first], keep, 1, lambda what, done: progress(what, done, 1))
        others = sorted({*choose(runs[0].report)} - {first})
        count = 1 + len(others)
        # as many at a time as requested, or as there are cores, if memory allows
        rank_bytes = int(MEMORY_MARGIN * max(runs[0].report.host_bytes, 1))
        most = workers or cores()
        at_once = max(1, min(most, most if claim.budget is None else claim.budget // rank_bytes))
        claim.take(at_once * rank_bytes)
        runs += _run(program, others, keep, at_once, lambda what, done: progress(what, 1 + done, count))
        progress("simulated", count, count)
    return sorted(runs, key=lambda run: run.simulation.rank)


def _remove_ranks(keep: Path, devices: int) -> None:
    """Remove the ranks of an earlier run with more devices."""
    try:
        ranks = kept_ranks(keep)
    except UserError:
        return
    for rank in ranks:
        if rank.number >= devices:
            shutil.rmtree(rank.directory)


def _run(
    program: Program, ranks: Sequence[int], keep: Path, at_once: int, on_progress: Callable[[str, int], None]
) -> list[RankRun]:
    waiting, running, runs = list(ranks), list[_RankProcess](), list[RankRun]()
    with ExitStack() as at_end:
        while waiting or running:
            while waiting and len(running) < at_once:
                rank = _RankProcess(program, waiting.pop(0), keep)
                at_end.callback(rank.close)
                running.append(rank)
            on_progress(f"simulating rank {', '.join(str(rank.number) for rank in running)}", len(runs))
            for rank in [rank for rank in running if rank.process.poll() is not None]:
                running.remove(rank)
                runs.append(rank.result())
            time.sleep(POLL_SECONDS)
    return runs


class _RankProcess:
    """A running program. MindSpore's files go to a directory that is removed after they are read."""

    def __init__(self, program: Program, number: int, keep: Path) -> None:
        self.program, self.number = program, number
        self.directory = keep / f"rank_{number}"
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.raw = make_temporary(".unread_", self.directory.resolve())
        environment = rank_environment(program.wheel, number, program.devices, self.raw, program.steps, program.batch)
        self.start = time.monotonic()
        try:
            self.process = JobProcess(f"rank {number}", program.command, environment, self.directory / LOG)
        except OSError as error:
            remove_temporary(self.raw)
            raise UserError(f"{program.command[0]}: cannot be started ({error.strerror})") from None

    def result(self) -> RankRun:
        """Read and keep the results, once the process has ended."""
        seconds, report = time.monotonic() - self.start, read_report(self.raw)
        if report is None or not report.trained:
            raise not_trained(self.directory, report, self.process.poll() or 0, self.number)
        (self.raw / LOG).symlink_to(self.directory / LOG)
        simulation = read_simulation(self.raw, report, self.number, self.program.devices, self.program.limit)
        if simulation is None:
            raise UserError(
                f"rank {self.number}: MindSpore wrote no memory statistics; its output is in {self.directory / LOG}"
            )
        simulation.save(self.directory / SIMULATION)
        self._keep_graphs()
        return RankRun(simulation, report, seconds, self.directory)

    def _keep_graphs(self) -> None:
        """Move the training graph to where ``mindllm inspect`` looks for it, and the other graphs to a subdirectory."""
        training = training_graph(self.raw, self.number)
        for path in graph_texts(self.raw, self.number):
            directory = self.directory if path == training else self.directory / "other_graphs"
            directory.mkdir(exist_ok=True)
            shutil.move(path, directory / path.name)
        for path in executable_files(self.raw, self.number):
            shutil.move(path, self.directory / path.name)

    def close(self) -> None:
        """End the process if it runs, and remove MindSpore's files."""
        self.process.kill()
        remove_temporary(self.raw)


def not_trained(directory: Path, report: Report | None, code: int, rank: int) -> UserError:
    """Return the error for a rank that ran no training graph; its log is in ``directory``."""
    return UserError(f"rank {rank}: {_why_not_trained(report, code)}; its output is in {directory / LOG}")


def _why_not_trained(report: Report | None, code: int) -> str:
    if report is None and code == -signal.SIGKILL:
        return "the program was killed by SIGKILL; this machine may be out of memory: end other programs, or use --workers 1"
    if report is None:
        return f"the program {ending(code)}, and none of its Python processes ended normally"
    package = (report.missing or "").partition(".")[0]
    if package in CANN_PACKAGES:
        return f"the program needs {package}, a Python package of CANN that has no stand-in"
    error = _error_text(report)
    if report.mindspore is None:
        return f"the program {error or ending(code)} before it imported MindSpore"
    if report.target not in (None, "Ascend"):
        return f"the program sets device_target {report.target}; only Ascend is simulated"
    if error:
        return f"the program {error}"
    if report.mode == "pynative":
        return (
            "the program ran in PyNative mode, which compiles no graph to simulate; "
            "call set_context(mode=GRAPH_MODE), or put the training step into mindspore.jit"
        )
    return f"the program {ending(code)} and never trained: it ran no graph with a backward pass"


def _error_text(report: Report) -> str:
    """Return ``failed with ValueError: …`` with the first line of the message; empty without an exception."""
    if report.error is None:
        return ""
    kind, text = report.error
    first = shortened(next((line.strip() for line in text.splitlines() if not STACK.match(line)), ""), MESSAGE_LENGTH)
    if MISSING_COMPILER.search(text):
        return f"needs the compiler of CANN (jit_level O2), which is not part of MindSpore; use O0 or O1 ({first})"
    return f"failed with {kind}: {first}"


def run_single(program: Program, keep: Path, stages: int, progress: Progress) -> str:
    """Run the program on one device and keep its results next to its ranks; return why that failed, or an empty string.

    Strategies, stages and sharded optimizers are dropped, and the step reads the rows of all devices.
    """
    directory = keep / SINGLE
    shutil.rmtree(directory, ignore_errors=True)
    try:
        ranks = kept_ranks(keep)
        first = read_rank(ranks[0])
        _require_small(first)
        batch = batch_shapes(first, max(1, len(ranks) // stages))
        run_ranks(
            replace(program, devices=1, batch=batch),
            0,
            lambda report: [0],
            directory,
            1,
            lambda what, done=0, total=None: progress(f"one device: {what}", done, total),
        )
        _require_batch(read_rank(KeptRank(0, directory / "rank_0")), batch)
    except (UserError, RunFailed) as error:
        reason = str(error).replace("\n", " ")
        shutil.rmtree(directory / "rank_0", ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_open(directory / NOT_ALONE) as file:
            file.write(reason)
        return reason
    return ""


def _require_small(rank: ExecutableRank) -> None:
    """Raise UserError if the whole program has too many weights to be executed here."""
    elements = sum(math.prod(whole_shape(parameter)) for parameter in rank.graph.parameters.values())
    if elements > LARGEST_MODEL:
        raise UserError(
            f"rank {rank.graph.rank} has parameters of {elements:,} elements, and at most {LARGEST_MODEL:,} can be executed "
            "here; give the program fewer layers with smaller widths"
        )


def _require_batch(single: ExecutableRank, batch: Sequence[Sequence[int]]) -> None:
    """Raise UserError if the step on one device does not read the rows of all devices."""
    shapes = batch_shapes(single, 1)
    if shapes != batch:
        raise UserError(
            f"its step on one device reads a batch of {', '.join(map(str, shapes))}, all devices together one of "
            f"{', '.join(map(str, batch))}, and rows could not be added"
        )
