"""Simulates many ranks in processes of their own, as many at once as the machine has cores and memory for."""

from __future__ import annotations

import itertools
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mindllm.compiled.device.stand_in import device_software
from mindllm.config import RunConfig, render_config
from mindllm.dry_run.cache import Kept, forget_old_ones, read_kept
from mindllm.dry_run.profile import Profile, load_profile
from mindllm.dry_run.request import LINES, Request
from mindllm.dry_run.server import CODE, CONFIG, LOG, Server
from mindllm.dry_run.source_lines import Lines, read_lines
from mindllm.dry_run.spread_simulations import run_on_cluster
from mindllm.dry_run.worker_memory import worker_bytes
from mindllm.errors import RunFailed, UserError
from mindllm.jobs.cores import cores
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.jobs.process import ending, last_lines
from mindllm.jobs.ray_cluster import is_spread
from mindllm.process.temporary import temporary_directory
from mindllm.reduced_runs.stage import reduce_to_layer
from mindllm.terminal.progress import Progress, unwatched

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1
ERROR = "error: "


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

    def _all(self, requests: Sequence[Request], read: Callable[[Path], Kept]) -> list[Kept]:
        files = [request.kept for request in requests]
        known = {file: read_kept(file, read) for file in files}
        missing = {file: request for file, request in zip(files, requests, strict=True) if known[file] is None}
        self.run_now += len(missing)
        if missing:
            self._run(missing | {r.kept: r for r in self.beside if read_kept(r.kept, read_lines) is None})
            forget_old_ones()
            known |= {file: read(file) for file in missing}
        return [kept for file in files if (kept := known[file]) is not None]

    def _run(self, missing: dict[Path, Request]) -> None:
        if is_spread():
            run_on_cluster(missing, self.progress)
        else:
            self._run_here(missing)

    def _run_here(self, missing: dict[Path, Request]) -> None:
        waiting = sorted(missing.items(), key=_place_in_line)
        with MemoryClaim() as claim, temporary_directory("mindllm_dry_run_") as directory:
            largest = sorted((request for _, request in waiting), key=lambda request: -worker_bytes(request.config))
            left = self._claimed(claim, largest)
            server = Server(directory)
            running: list[_Job] = []
            try:
                while waiting or running:
                    while waiting and self._has_room(running, waiting[0][1], left):
                        file, request = waiting.pop(0)
                        place = directory / str(len(waiting))
                        place.mkdir()
                        running.append(_Job(request, file, place, server))
                    running = [job for job in running if not job.has_ended()]
                    names = ", ".join(job.request.name for job in running)
                    self.progress(f"simulating {names}", len(missing) - len(waiting) - len(running), len(missing))
                    time.sleep(POLL_SECONDS)
            finally:
                server.kill()

    def _claimed(self, claim: MemoryClaim, waiting: Sequence[Request]) -> int:
        """Memory that workers may take: what the largest ones take, as many as run at once and fit; one always must."""
        wanted = list(itertools.accumulate(worker_bytes(request.config) for request in waiting[: self.workers]))
        fitting = [total for total in wanted if claim.fits(total)]
        if not fitting:
            raise UserError(
                f"simulating {waiting[0].name} takes about {gibibytes(wanted[0])} of this machine's memory, and there are "
                f"{claim.describe()}: {ADVICE}; or leave out --full, which simulates whole stages"
            )
        if len(fitting) < len(wanted):
            told = "%d simulations at a time: memory for more is not free (%s)"
            logger.warning(told, len(fitting), claim.describe())
        claim.take(fitting[-1])
        return fitting[-1]

    def _has_room(self, running: Sequence[_Job], request: Request, left: int) -> bool:
        """Whether one more worker may start; one of them always may."""
        taken = sum(worker_bytes(job.request.config) for job in running)
        return not running or (len(running) < self.workers and taken + worker_bytes(request.config) <= left)


def _place_in_line(item: tuple[Path, Request]) -> int:
    """Source lines first, from which the others learn what MindSpore has parsed, then what takes longest."""
    _, request = item
    return -sys.maxsize if request.what == LINES else -worker_bytes(request.config)


def _request_of_lines(config: RunConfig) -> Request:
    return Request(reduce_to_layer(config), 0, "source lines", LINES)


class _Job:
    """A request that the server works on, in a directory with its log. It ends with its server."""

    def __init__(self, request: Request, output: Path, directory: Path, server: Server) -> None:
        self.request = request
        self.log = directory / LOG
        self._server, self._code = server, directory / CODE
        (directory / CONFIG).write_text(render_config(request.config), encoding="utf-8")
        server.begin(directory, request.rank, output, request.what == LINES)

    def has_ended(self) -> bool:
        """Return True if the job succeeded and False while it runs; raise if it failed."""
        code = self._exit_code()
        if code in (None, 0):
            return code == 0
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""
        if code == UserError.exit_code and ERROR in text:
            raise UserError(f"{self.request.name}: {text[text.rindex(ERROR) :].removeprefix(ERROR).strip()}")
        advice = ""
        if code == -signal.SIGKILL:
            advice = "; the system may be out of memory: end other programs, or write --workers 1"
        raise RunFailed(f"simulating {self.request.name} {ending(code)}{advice}\n{last_lines(self.log)}")

    def _exit_code(self) -> int | None:
        """Return the exit code, or the negative number of the signal that killed the job; None while it runs."""
        if self._code.is_file():
            return int(self._code.read_text())
        if (code := self._server.process.poll()) is None:
            return None
        self.log = self._server.process.log
        return code or RunFailed.exit_code


def simulations_here(workers: int | None = None, progress: Progress = unwatched) -> Simulations:
    """Return simulations by MindSpore's dry run.

    Raises:
        StandInUnavailable: this machine cannot simulate a device, as where it has no C compiler.
    """
    device_software()
    return Simulations(workers, progress)
