"""The output directory of a run, claimed before anything is written there: by one run, seen by all its ranks, empty or meant.

A lock lets one trainer into a directory; it ends with its process, however that ends.

All ranks find each other in the directory before a run begins: proof that it is one directory, seen by every node.

Each rank writes a file with a number drawn at random; the first one gathers them and answers with all of them and a name for the
run. A rank that finds its own number in the answer sees what the first rank sees, and is not looking at an earlier run's files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from mindllm.config import RunConfig
from mindllm.errors import RunFailed, UserError
from mindllm.files import atomic_open, naming
from mindllm.process.exit_hooks import when_leaving
from mindllm.train.checkpoint import CheckpointStore, Peers
from mindllm.train.checkpoint.joint import named
from mindllm.train.job.ranks import Ranks
from mindllm.train.job.restart import has_started
from mindllm.train.metrics_file import METRICS_NAME, read_metrics

LOCK_NAME = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
logger = logging.getLogger(__name__)
DIRECTORY = ".ranks"
ANSWER = "all.json"
POLL_SECONDS = 0.05
CHECKPOINTS = "checkpoint"
ROLL_TIMEOUT_SECONDS = 600.0


class RunLock:
    """The lock on ``directory`` (flock(2) on a file in it), which says who holds it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            UserError: another process holds it, or the directory cannot be written to.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = open(self.directory / LOCK_NAME, "a+", encoding="utf-8")  # noqa: SIM115 (held until release)
        except OSError as error:
            raise UserError(
                f"{self.directory}: cannot be written to ({error.strerror}); give another --output_dir"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(self.directory, file) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            logger.warning("%s: its file system has no locks: nothing keeps a second run out", self.directory)
        with naming(self.directory / LOCK_NAME):
            file.truncate(0)
            json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
            file.flush()
        self._file = file

    def release(self) -> None:
        """Gives it back."""
        if self._file is not None:
            self._file.close()
            self._file = None


def require_unlocked(directory: Path) -> None:
    """Refuse a directory that a run trains in; nothing is made or kept there.

    Raises:
        UserError: another process holds its lock.
    """
    with suppress(FileNotFoundError), open(directory / LOCK_NAME, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(directory, file) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise


def _in_use(directory: Path, file: IO[str]) -> UserError:
    return UserError(f"{directory} is in use: {_holder(file)}; give another --output_dir, or stop that run first")


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        content = json.loads(file.read())
        return f"process {content['pid']} on {content['host']} trains there"
    except (ValueError, KeyError, TypeError):
        return "another process trains there"


def meet_ranks(output_dir: Path, rank: int, count: int, timeout: float) -> str:
    """Waits until all ranks are seen by the first one; returns the name of the run, the same for all of them.

    Raises:
        RunFailed: ranks that do not appear in time, by number: they see another directory, or have not started.
    """
    directory = output_dir / DIRECTORY
    return _gather(directory, count, timeout) if rank == 0 else _answer_to(directory, rank, timeout)


def _gather(directory: Path, count: int, timeout: float) -> str:
    """The first rank's side. Files of earlier runs go first; ranks that came earlier write theirs again."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout
    numbers: dict[int, str] = {}
    name = secrets.token_hex(8)
    while len(numbers) < count - 1:
        for rank in set(range(1, count)) - numbers.keys():
            with suppress(OSError, ValueError, KeyError, TypeError):
                numbers[rank] = json.loads(_path(directory, rank).read_bytes())["number"]
        if len(numbers) < count - 1 and time.monotonic() > deadline:
            missing = named(set(range(1, count)) - numbers.keys())
            raise RunFailed(
                f"{missing} did not appear in {directory} within {timeout:.0f} s; output_dir must be a directory that all "
                "nodes share"
            )
        time.sleep(POLL_SECONDS)
    with atomic_open(directory / ANSWER) as file:
        json.dump({"name": name, "numbers": list(numbers.values())}, file)
    return name


def _answer_to(directory: Path, rank: int, timeout: float) -> str:
    number, deadline = secrets.token_hex(8), time.monotonic() + timeout
    while time.monotonic() < deadline:
        with suppress(OSError):  # the first rank may be removing the directory
            if not _path(directory, rank).exists():
                directory.mkdir(parents=True, exist_ok=True)
                with atomic_open(_path(directory, rank)) as file:
                    json.dump({"number": number, "host": socket.gethostname()}, file)
        with suppress(OSError, ValueError, KeyError, TypeError):
            answer = json.loads((directory / ANSWER).read_bytes())
            if number in answer["numbers"]:
                return answer["name"]
        time.sleep(POLL_SECONDS)
    raise RunFailed(
        f"rank 0 did not answer in {directory} on {socket.gethostname()} within {timeout:.0f} s; output_dir must be a "
        "directory that all nodes share"
    )


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.json"


def claim_output_directory(config: RunConfig, ranks: Ranks, timeout: float = ROLL_TIMEOUT_SECONDS) -> Peers:
    """Claims ``output_dir`` for this run until the process ends; returns who writes checkpoints there together.

    Raises:
        UserError: another run is training there, or has trained there and nothing says what becomes of its results.
        RunFailed: not all ranks see the same directory.
    """
    directory = Path(config.output_dir)
    if ranks.is_first:
        lock = RunLock(directory)
        lock.acquire()
        when_leaving(lock.release)
        require_no_results(config)
    if ranks.count == 1:
        return Peers()
    name = meet_ranks(directory, ranks.rank, ranks.count, timeout)
    return Peers(ranks.rank, ranks.count, name, lambda answer: ranks.sum([float(not answer)]) == [0.0])


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint in the output directory of a run.

    Raises:
        UserError: there is none yet.
    """
    if (newest := CheckpointStore(run / CHECKPOINTS).newest()) is None:
        raise UserError(f"{run}: a run without a checkpoint yet; name a model, or wait for its first")
    return newest


def describe_results(directory: Path) -> list[str]:
    """Return what a run has left in ``directory``, in words; nothing where none has."""
    newest = CheckpointStore(directory / CHECKPOINTS).newest()
    metrics = directory / METRICS_NAME
    steps = len(read_metrics(metrics)) if metrics.is_file() else 0
    found = [f"{steps} steps in {METRICS_NAME}"] if steps else []
    return [*found, f"checkpoint {newest.name}"] if newest else found


def require_no_results(config: RunConfig) -> None:
    """Refuse a directory with results of an earlier run: a new one would cut its metrics off, and in time delete its checkpoints.

    Raises:
        UserError: they are there, and nothing says what becomes of them.
    """
    directory = Path(config.output_dir)
    if config.resume_training is not False or config.overwrite or has_started(config):
        return
    if not (found := describe_results(directory)):
        return
    raise UserError(
        f"{directory} holds a run already ({' and '.join(found)}); go on with --resume_training, give another --output_dir, "
        "or write --overwrite, which begins anew: the metrics are lost, the checkpoints give way to new ones"
    )
