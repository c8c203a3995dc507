"""Profiles of simulated ranks: those that are stored, and others from MindSpore's dry run, several at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mindllm.compiled.device.stand_in import device_software
from mindllm.compiled.simulation.simulate_rank import PRELOAD, server_environment, simulate_rank, source_lines
from mindllm.config import RunConfig, load_config, tree_of
from mindllm.config.compiled_keys import compiled_keys
from mindllm.dry_run.profile import Profile, load_profile, profile_of, save_profile
from mindllm.dry_run.source_lines import Lines, read_lines, write_lines
from mindllm.errors import RunFailed, UserError
from mindllm.jobs.cores import Core, cores
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.jobs.pool import Outcome, Pool, Task
from mindllm.jobs.process import ERROR, ending, last_lines
from mindllm.jobs.ray_cluster import RayPool, is_spread
from mindllm.jobs.store import Store
from mindllm.parallel.stages import stages_of
from mindllm.process.exit_hooks import skip_exit_functions
from mindllm.reduced_runs.stage import micro_batches_of, reduce_to_layer
from mindllm.sources import software_key
from mindllm.terminal.progress import Progress, unwatched
from mindllm.units import MIB

logger = logging.getLogger(__name__)
SIMULATE, LINES = "simulate", "lines"
RESULTS = Store("dry_run", max_entries=400)
LIMIT = "context.max_device_memory"  # results are compared with it afterwards
Value = TypeVar("Value")
# Measured with MindSpore 2.10 on Llama 2 of several widths: both processes of a task, a compiled layer, and a layer that is
# scheduled for a micro-batch. Widths hardly matter, since no weight is allocated.
PROCESSES, LAYER, SCHEDULED_LAYER = 1150 * MIB, 12 * MIB, 4 * MIB


@dataclass(frozen=True)
class Request:
    """A rank to simulate, or to list the source lines of. ``name`` describes it in progress and errors."""

    config: RunConfig
    rank: int
    name: str
    what: str = SIMULATE

    @property
    def key(self) -> str:
        """The key of the answer in the store."""
        return rank_key(self.config, self.rank, self.what)

    @property
    def task(self) -> Task:
        """The task that writes the answer."""
        arguments = (tree_of(self.config), self.rank, self.what)
        return Task(self.name, f"{__name__}:answer", arguments, RESULTS.path(self.key), worker_bytes(self.config))


def rank_key(config: RunConfig, rank: int, kind: str) -> str:
    """Return the key of a result about a rank, which does not depend on data, learning rates or checkpoints."""
    keys = {name: value for name, value in compiled_keys(config).items() if name != LIMIT}
    text = "\0".join([json.dumps(keys, sort_keys=True, default=str), str(rank), software_key()])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.{kind}"


def worker_bytes(config: RunConfig) -> int:
    """Return the memory that a simulation needs at most, from the operators that it compiles and schedules."""
    chunks = config.parallel_config.pipeline_stage * config.model.config.pp_interleave_num  # other stages: a layer each
    on_stage = max(stage.layers for stage in stages_of(config))
    return PROCESSES + (chunks + on_stage) * LAYER + on_stage * micro_batches_of(config) * SCHEDULED_LAYER


def answer(tree: dict[str, Any], rank: int, what: str, output: str) -> None:
    """Simulate a rank and write its profile, or write its source lines: a task, here or on a node of a cluster."""
    config = load_config(tree)
    Core()
    try:
        if what == LINES:
            write_lines(source_lines(config, rank), Path(output))
        else:
            save_profile(profile_of(simulate_rank(config, rank)), Path(output))
    finally:
        skip_exit_functions()  # of MindSpore, which this process has only imported


class Simulations:
    """Gives profiles: those that are kept from earlier at once, others by running workers.

    Args:
        workers: how many at once; None: one for each core, as memory allows.
        progress: told of simulations that run, how many are done, and of how many.
    """

    def __init__(self, workers: int | None = None, progress: Progress = unwatched) -> None:
        self.workers = workers or cores()
        self.progress = progress
        self.run_now = 0  # simulations that were not kept from earlier
        self.beside: list[Request] = []  # source lines that are found while others simulate

    def profiles(self, requests: Sequence[Request]) -> list[Profile]:
        """The profiles of all requests, in their order; equal ones are simulated once.

        Raises:
            UserError: what MindSpore's compiler refuses, or too little memory for a single worker.
            RunFailed: a worker that ended unexpectedly. Whatever ends this call ends all workers.
        """
        return self._all(requests, load_profile)

    def prepare_source_lines(self, config: RunConfig) -> None:
        """Has the source lines of a run found beside the next simulations, where cores would wait at their end."""
        self.beside = [_request_of_lines(config)]

    def source_lines(self, config: RunConfig) -> Lines:
        """The source lines of the operators of a run."""
        return self._all([_request_of_lines(config)], read_lines)[0]

    def _all(self, requests: Sequence[Request], read: Callable[[Path], Value]) -> list[Value]:
        keys = [request.key for request in requests]
        values = {key: RESULTS.read(key, read) for key in keys}
        missing = {key: request for key, request in zip(keys, requests, strict=True) if values[key] is None}
        self.run_now += len(missing)
        if missing:
            lines = {one.key: one for one in self.beside if RESULTS.read(one.key, read_lines) is None}
            self._run((missing | lines).values())
            values |= {key: read(RESULTS.path(key)) for key in missing}
            RESULTS.trim()
        return [value for key in keys if (value := values[key]) is not None]

    def _run(self, requests: Iterable[Request]) -> None:
        # Source lines first, from which the others learn what MindSpore has parsed, then what takes longest.
        ordered = sorted(requests, key=lambda request: (request.what != LINES, -worker_bytes(request.config)))
        tasks = [request.task for request in ordered]
        if is_spread():
            with RayPool() as cluster:
                self._collect(cluster, tasks)
            return
        with MemoryClaim() as claim:
            memory = self._claim(claim, tasks)
            with Pool(self.workers, memory, PRELOAD, server_environment()) as pool:
                self._collect(pool, tasks)

    def _claim(self, claim: MemoryClaim, tasks: Sequence[Task]) -> int:
        """Claim and return the memory for simulations: the largest ones, as many as run at a time and fit, at least one."""
        largest = sorted(tasks, key=lambda task: -task.memory)[: self.workers]
        sums = list(itertools.accumulate(task.memory for task in largest))
        fitting = [total for total in sums if claim.fits(total)]
        if not fitting:
            raise UserError(
                f"simulating {largest[0].name} takes about {gibibytes(sums[0])} of this machine's memory, and there are "
                f"{claim.describe()}: {ADVICE}; or leave out --full, which simulates whole stages"
            )
        if len(fitting) < len(sums):
            logger.warning("%d simulations at a time: memory for more is not free (%s)", len(fitting), claim.describe())
        claim.take(fitting[-1])
        return fitting[-1]

    def _collect(self, pool: Pool | RayPool, tasks: Sequence[Task]) -> None:
        """Run all tasks, and raise the error of one that fails."""
        for task in tasks:
            pool.submit(task)
        while pool.left:
            for outcome in pool.poll():
                if outcome.code != 0:
                    raise _failure(outcome)
            running = pool.running
            names = ", ".join(task.name for task in running[: self.workers])
            self.progress(f"simulating {names}", len(tasks) - pool.left, len(tasks))
            pool.wait()


def _failure(outcome: Outcome) -> Exception:
    """Return the error of a simulation that failed."""
    name, code, log = outcome.task.name, outcome.code, outcome.log
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if code == UserError.exit_code and ERROR in text:
        return UserError(f"{name}: {text[text.rindex(ERROR) :].removeprefix(ERROR).strip()}")
    advice = ""
    if code == -signal.SIGKILL:
        advice = "; the system may be out of memory: end other programs, or write --workers 1"
    return RunFailed(f"simulating {name} {ending(code)}{advice}\n{last_lines(log)}")


def _request_of_lines(config: RunConfig) -> Request:
    return Request(reduce_to_layer(config), 0, "source lines", LINES)


def simulations_here(workers: int | None = None, progress: Progress = unwatched) -> Simulations:
    """Return simulations by MindSpore's dry run.

    Raises:
        StandInUnavailable: this machine cannot simulate a device, as where it has no C compiler.
    """
    device_software()
    return Simulations(workers, progress)
