"""The ranks of an Ascend node, started by MindSpore's own msrun, and watched here.

msrun kills all ranks on Ctrl-C and leaves them behind on SIGTERM, and it starts nothing again. So signals go to the ranks
themselves, whose process numbers their signs of life tell, and a rank that hangs or a job that fails is seen to here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mindllm.command import INTERRUPTED
from mindllm.errors import UserError
from mindllm.launch.heartbeat import (
    DIRECTORY,
    DUMP_SIGNAL,
    describe_hang,
    forget_beats,
    hanging,
    last_steps,
    read_beats,
)
from mindllm.launch.job import DUMP_SECONDS, LOOK_SECONDS, POLL_SECONDS, JobFailed, JobStopped
from mindllm.launch.signals import StopRequests


def msrun_command(
    command: Sequence[str], workers: int, local: int, address: tuple[str, int], node: int, log_dir: Path, timeout: int
) -> list[str]:
    """The command line of msrun for this node; its options are those of MindSpore 2.10."""
    host, port = address
    return [
        "msrun",
        f"--worker_num={workers}",
        f"--local_worker_num={local}",
        f"--master_addr={host}",
        f"--master_port={port}",
        f"--node_rank={node}",
        f"--log_dir={log_dir}",
        "--join=True",
        f"--cluster_time_out={timeout}",
        *command,
    ]


class MsrunJob:
    """Runs a composed msrun ``command`` whose ranks on this node are ``ranks``; a context manager that leaves none behind.

    ``log``: what takes the output of msrun; None: the terminal. What ``go_on`` raises, which is called while it runs, ends it.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: range,
        log_dir: Path,
        variables: Mapping[str, str],
        log: Path | None = None,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        self.go_on = go_on
        self.command, self.ranks, self.log_dir, self.log = command, ranks, log_dir, log
        self.variables = {**os.environ, **variables, DIRECTORY: str(log_dir)}
        self.stopped_by: int | None = None
        self.next_look = 0.0

    def __enter__(self) -> MsrunJob:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        forget_beats(self.log_dir, self.ranks)
        self.requests = StopRequests(self._stop)
        self.requests.install()
        try:
            self.process = self._start()
        except FileNotFoundError:
            raise UserError("there is no msrun here; activate the environment that MindSpore is installed in") from None
        return self

    def _start(self) -> subprocess.Popen:
        if self.log is None:
            return subprocess.Popen(self.command, env=self.variables, start_new_session=True)
        with open(self.log, "wb") as output:
            return subprocess.Popen(
                self.command, env=self.variables, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
            )

    def __exit__(self, *exception: object) -> None:
        self._signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.requests.restore()

    def wait(self) -> int:
        """Waits for the end of msrun; returns the exit code of the job.

        Raises:
            JobFailed: it has failed, or a rank hangs.
        """
        while self.process.poll() is None:
            time.sleep(POLL_SECONDS)
            self.go_on()
            if time.monotonic() >= self.next_look:
                self.next_look = time.monotonic() + LOOK_SECONDS
                self._look_for_hanging_ranks()
        code, beats = self.process.returncode, read_beats(self.log_dir, self.ranks)
        if code == 0 or (self.stopped_by is not None and code == INTERRUPTED):
            return 0 if self.stopped_by in (None, signal.SIGTERM) else INTERRUPTED
        if self.stopped_by is not None and not beats:
            raise JobStopped("stopped before the first step: nothing is saved", 128 + self.stopped_by)
        steps = f"; {last_steps(beats)}" if beats else ""
        logs = f"{self.log_dir}/worker_*.log"
        raise JobFailed(f"msrun ended with exit code {code}{steps}. The logs of the ranks: {logs}", max(code, 1))

    def _look_for_hanging_ranks(self) -> None:
        now, beats = time.monotonic(), read_beats(self.log_dir, self.ranks)
        if not (found := hanging(beats, [], now)):
            return
        for rank in found:
            with suppress(ProcessLookupError):
                os.kill(beats[rank].pid, DUMP_SIGNAL)
        time.sleep(DUMP_SECONDS)
        log = self.log_dir / f"worker_{found[0]}.log"
        raise JobFailed(
            f"{describe_hang(beats, found, now)}; the job was ended; {last_steps(beats)}. Its log: {log}", 1
        )

    def _signal(self, number: int) -> None:
        """Sends a signal to the ranks of this node that have given a sign of life."""
        for beat in read_beats(self.log_dir, self.ranks).values():
            with suppress(ProcessLookupError):
                os.kill(beat.pid, number)

    def _stop(self, number: int) -> None:
        self.stopped_by = number
        os.write(2, b"stopping after the step in progress; a second signal ends the job at once\n")
        if read_beats(self.log_dir, self.ranks):
            self._signal(number)
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
