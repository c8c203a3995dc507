"""Runs a program once for each rank asked for: one to learn from, then as many at a time as this machine has memory for.

Where a program told nothing about its memory, one line says why.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mindllm.compiled.device.wheel import Wheel
from mindllm.compiled.foreign.environment import (
    LOG,
    Report,
    Shapes,
    executable_files,
    graph_texts,
    rank_environment,
    read_report,
    read_simulation,
    training_graph,
)
from mindllm.compiled.foreign.kept_program import SIMULATION, KeptRank, kept_ranks
from mindllm.compiled.simulation.simulation import Simulation
from mindllm.dry_run.simulations import POLL_SECONDS
from mindllm.errors import UserError, shortened
from mindllm.jobs.cores import cores
from mindllm.jobs.memory import MemoryClaim
from mindllm.jobs.process import JobProcess, ending
from mindllm.process.temporary import make_temporary, remove_temporary
from mindllm.terminal.progress import Progress, unwatched

LONGEST = 300  # of a program's own message
OF_CANN = frozenset(
    {
        "acl", "te", "tbe", "hccl", "aclruntime", "auto_tune", "auto_search", "opc_tool", "op_compile_tool", "op_test_frame",
        "schedule_search", "asc_op_compile_base", "ais_bench", "llm_datadist", "dataflow", "mspti", "msprof", "torch_npu",
    }
)  # fmt: skip
COMPILER_OF_CANN = re.compile(r"Load backend failed")  # what MindSpore says where GE is asked for
STACK = re.compile(r"^\s*-{4,}|^\s*- C\+\+|^\s*$")
LEAST = 1 << 30  # bytes that MindSpore and its dry run take of any program
GROWTH = 1.25  # what another rank may take of this machine's memory, as a multiple of what the first one took
Choose = Callable[[Report], Sequence[int]]


def ended_without_training(directory: Path, report: Report | None, code: int, rank: int) -> UserError:
    """What to say of a rank that has not run a training graph; its log is in ``directory``."""
    return UserError(f"rank {rank}: {_reason(report, code)}; its output is in {directory / LOG}")


def _reason(report: Report | None, code: int) -> str:
    if report is None:
        return _without_report(code)
    if report.missing and report.missing.partition(".")[0] in OF_CANN:
        name = report.missing.partition(".")[0]
        return f"the program needs {name}, a Python package of CANN, which nothing stands in for"
    if report.mindspore is None:
        return f"the program {_failed(report) or ending(code)} before it imported MindSpore"
    if report.target not in (None, "Ascend"):
        return f"the program asks for device_target {report.target}; only Ascend is simulated"
    if failed := _failed(report):
        return f"the program {failed}"
    if report.mode == "pynative":
        return (
            "the program ran in PyNative mode, operator by operator, where nothing is compiled that could be simulated; "
            "set_context(mode=GRAPH_MODE), or put the training step into mindspore.jit"
        )
    return f"the program {ending(code)} and never trained: it ran no graph with a backward pass"


def _without_report(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the program was killed by SIGKILL; this machine may be out of memory: end other programs, or write --workers 1"
    return f"the program {ending(code)}, and no Python of it came to its end"


def _failed(report: Report) -> str:
    """``failed with ValueError: …``, the first line of the message; empty where it did not."""
    if report.error is None:
        return ""
    kind, text = report.error
    first = next((line.strip() for line in text.splitlines() if not STACK.match(line)), "")
    if COMPILER_OF_CANN.search(text):
        asked = "asks for the compiler of CANN (jit_level O2), which is not in MindSpore; write O0 or O1"
        return f"{asked} ({shortened(first, LONGEST)})"
    return f"failed with {kind}: {shortened(first, LONGEST)}"


@dataclass(frozen=True)
class Subject:
    """The program: its command line, the MindSpore it imports, its devices, the steps after which it may end."""

    command: Sequence[str]
    wheel: Wheel
    devices: int
    steps: int
    limit: int | None  # bytes; None: what the program says
    batch: Shapes | None = None  # of a step, where one device is to compute what several do


@dataclass(frozen=True)
class RankRun:
    """A rank whose training step was simulated; ``directory`` holds what is kept of it."""

    simulation: Simulation
    report: Report
    seconds: float
    directory: Path


def run_ranks(
    subject: Subject,
    first: int,
    choose: Choose,
    keep: Path,
    workers: int | None,
    progress: Progress = unwatched,
) -> list[RankRun]:
    """Runs rank ``first``, has ``choose`` name all ranks from what it reported, and runs the others.

    Raises:
        UserError: a rank that ended without a simulated training step. Whatever ends this call ends all programs.
    """
    with MemoryClaim() as claim:
        claim.take(LEAST)
        for stale in (rank.directory for rank in _kept(keep) if rank.number >= subject.devices):
            shutil.rmtree(stale)  # of a run over more devices
        done = _run([first], subject, keep, 1, lambda what, ended: progress(what, ended, 1))
        others = sorted({*choose(done[0].report)} - {first})
        count = 1 + len(others)
        at_once = _at_once(done[0].report.host_bytes, workers, claim)
        done += _run(others, subject, keep, at_once, lambda what, ended: progress(what, 1 + ended, count))
        progress("simulated", count, count)
    return sorted(done, key=lambda run: run.simulation.rank)


def _kept(keep: Path) -> list[KeptRank]:
    """What is kept already; nothing where nothing is."""
    try:
        return kept_ranks(keep)
    except UserError:
        return []


def _at_once(host_bytes: int, workers: int | None, claim: MemoryClaim) -> int:
    """As many as were asked for, or as there are cores, where there is memory for them; it is claimed."""
    one, most = int(GROWTH * max(host_bytes, 1)), workers or cores()
    fitting = most if claim.budget is None else claim.budget // one
    at_once = max(1, min(most, fitting))
    claim.take(at_once * one)
    return at_once


def _run(
    ranks: Sequence[int], subject: Subject, keep: Path, at_once: int, told: Callable[[str, int], None]
) -> list[RankRun]:
    waiting, running, done = list(ranks), list[_Rank](), list[RankRun]()
    with ExitStack() as at_end:
        while waiting or running:
            while waiting and len(running) < at_once:
                rank = _Rank(waiting.pop(0), subject, keep)
                at_end.callback(rank.close)
                running.append(rank)
            told(f"simulating rank {', '.join(str(rank.number) for rank in running)}", len(done))
            for rank in [rank for rank in running if rank.process.poll() is not None]:
                running.remove(rank)
                done.append(rank.result())
            time.sleep(POLL_SECONDS)
    return done


class _Rank:
    """A running program; what MindSpore writes goes to a directory that is removed when it has been read."""

    def __init__(self, number: int, subject: Subject, keep: Path) -> None:
        self.number, self.subject = number, subject
        self.kept = keep / f"rank_{number}"
        shutil.rmtree(self.kept, ignore_errors=True)
        self.kept.mkdir(parents=True)
        self.raw = make_temporary(".unread_", self.kept.resolve())
        environment = rank_environment(subject.wheel, number, subject.devices, self.raw, subject.steps, subject.batch)
        self.start = time.monotonic()
        try:
            self.process = JobProcess(f"rank {number}", subject.command, environment, self.kept / LOG)
        except OSError as error:
            remove_temporary(self.raw)
            raise UserError(f"{subject.command[0]}: cannot be started ({error.strerror})") from None

    def result(self) -> RankRun:
        """What has been simulated, once the process has ended."""
        seconds, report = time.monotonic() - self.start, read_report(self.raw)
        if report is None or not report.trained:
            raise ended_without_training(self.kept, report, self.process.poll() or 0, self.number)
        (self.raw / LOG).symlink_to(self.kept / LOG)
        simulation = read_simulation(self.raw, report, self.number, self.subject.devices, self.subject.limit)
        if simulation is None:
            raise UserError(
                f"rank {self.number}: MindSpore told nothing about its memory; its output is in {self.kept / LOG}"
            )
        simulation.save(self.kept / SIMULATION)
        self._keep_graphs()
        return RankRun(simulation, report, seconds, self.kept)

    def _keep_graphs(self) -> None:
        """The training graph where ``ir_inspect`` looks for it, the others beside it."""
        training = training_graph(self.raw, self.number)
        for path in graph_texts(self.raw, self.number):
            directory = self.kept if path == training else self.kept / "other_graphs"
            directory.mkdir(exist_ok=True)
            shutil.move(path, directory / path.name)
        for path in executable_files(self.raw, self.number):
            shutil.move(path, self.kept / path.name)

    def close(self) -> None:
        """Ends the process if it runs, and removes what nobody reads any more."""
        self.process.kill()
        remove_temporary(self.raw)
