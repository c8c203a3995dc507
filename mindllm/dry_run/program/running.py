"""Runs a program once for each rank asked for: one to learn from, then as many at a time as this machine has memory for."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from mindllm.compiled.device.wheel import Wheel
from mindllm.compiled.foreign.environment import (
    LOG,
    Report,
    executable_files,
    graph_texts,
    rank_environment,
    read_report,
    read_simulation,
    training_graph,
)
from mindllm.compiled.foreign.kept_program import SIMULATION
from mindllm.compiled.simulation.simulation import Simulation
from mindllm.dry_run.program.ending import ended_without_training
from mindllm.dry_run.simulations import POLL_SECONDS
from mindllm.errors import UserError
from mindllm.launch.process import JobProcess
from mindllm.process.host_memory import MemoryClaim
from mindllm.process.temporary import make_temporary, remove_temporary
from mindllm.terminal.console import progress

LEAST = 1 << 30  # bytes that MindSpore and its dry run take of any program
GROWTH = 1.25  # what another rank may take of this machine's memory, as a multiple of what the first one took
Choose = Callable[[Report], Sequence[int]]


@dataclass(frozen=True)
class Subject:
    """The program: its command line, the MindSpore it imports, its devices, the steps after which it may end."""

    command: Sequence[str]
    wheel: Wheel
    devices: int
    steps: int
    limit: int | None  # bytes; None: what the program says


@dataclass(frozen=True)
class RankRun:
    """A rank whose training step was simulated; ``directory`` holds what is kept of it."""

    simulation: Simulation
    report: Report
    seconds: float
    directory: Path


def run_ranks(subject: Subject, first: int, choose: Choose, keep: Path, workers: int | None) -> list[RankRun]:
    """Runs rank ``first``, has ``choose`` name all ranks from what it reported, and runs the others.

    Raises:
        UserError: a rank that ended without a simulated training step. Whatever ends this call ends all programs.
    """
    with MemoryClaim() as claim, progress(transient=False) as bar:
        claim.take(LEAST)
        task = bar.add_task("simulating", total=None)
        done = _run([first], subject, keep, 1, lambda: bar.advance(task), bar, task)
        wanted = sorted(set(choose(done[0].report)) | {first})
        bar.update(task, total=len(wanted))
        others = [rank for rank in wanted if rank != first]
        at_once = _at_once(done[0].report.host_bytes, workers, claim)
        done += _run(others, subject, keep, at_once, lambda: bar.advance(task), bar, task)
        bar.update(task, description="simulated")
    return sorted(done, key=lambda run: run.simulation.rank)


def _at_once(host_bytes: int, workers: int | None, claim: MemoryClaim) -> int:
    """As many as were asked for, or as there are cores, where there is memory for them; it is claimed."""
    one, cores = int(GROWTH * max(host_bytes, 1)), len(os.sched_getaffinity(0))
    fitting = cores if claim.budget is None else claim.budget // one
    at_once = max(1, min(workers or cores, fitting))
    claim.take(at_once * one)
    return at_once


def _run(
    ranks: Sequence[int], subject: Subject, keep: Path, at_once: int, advance: Callable[[], None], bar: Progress, task
) -> list[RankRun]:
    waiting, running, done = list(ranks), list[_Rank](), list[RankRun]()
    with ExitStack() as at_end:
        while waiting or running:
            while waiting and len(running) < at_once:
                rank = _Rank(waiting.pop(0), subject, keep)
                at_end.callback(rank.close)
                running.append(rank)
            bar.update(task, description=f"simulating rank {', '.join(str(rank.number) for rank in running)}")
            for rank in [rank for rank in running if rank.process.poll() is not None]:
                running.remove(rank)
                done.append(rank.result())
                advance()
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
        environment = rank_environment(subject.wheel, number, subject.devices, self.raw, subject.steps)
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
