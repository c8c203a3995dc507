"""The output directory of a run, claimed before anything is written: by one run at a time, visible to all its ranks.

A file lock admits one training process per directory, and is released when the process ends.

Before a run starts, its ranks meet in the directory, which proves that every node sees the same one. Each rank writes a file
with a random token. The first rank collects the tokens and answers with all of them and a name for the run. A rank that finds
its token in the answer sees the same directory as the first rank, and not files of an earlier run.
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
from mindllm.train.checkpoint.joint import list_ranks
from mindllm.train.job.ranks import Ranks
from mindllm.train.job.restart import has_started
from mindllm.train.metrics_file import METRICS_NAME, read_metrics

LOCK_NAME = ".lock"
NO_LOCK_SUPPORT = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
logger = logging.getLogger(__name__)
DIRECTORY = ".ranks"
ANSWER = "all.json"
POLL_SECONDS = 0.05
CHECKPOINTS = "checkpoint"
MEETING_TIMEOUT_SECONDS = 600.0


class RunLock:
    """Lock on ``directory``: flock(2) on a file that names its owner."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            UserError: another process holds it, or the directory cannot be written to.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = open(self.directory / LOCK_NAME, "a+", encoding="utf-8")  # noqa: SIM115 (held until release)
        except OSError as error:
            raise UserError(
                f"{self.directory}: not writable ({error.strerror}); pass a different --output_dir"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(self.directory, file) from None
        except OSError as error:
            if error.errno not in NO_LOCK_SUPPORT:
                raise
            logger.warning(
                "%s: the file system does not support locks; a second run would not be detected", self.directory
            )
        with naming(self.directory / LOCK_NAME):
            file.truncate(0)
            json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
            file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def require_unlocked(directory: Path) -> None:
    """Raise if a run trains in ``directory``. Nothing is created there.

    Raises:
        UserError: another process holds the lock.
    """
    with suppress(FileNotFoundError), open(directory / LOCK_NAME, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(directory, file) from None
        except OSError as error:
            if error.errno not in NO_LOCK_SUPPORT:
                raise


def _in_use(directory: Path, file: IO[str]) -> UserError:
    return UserError(
        f"{directory} is in use: {_describe_owner(file)}; pass a different --output_dir, or stop that run first"
    )


def _describe_owner(file: IO[str]) -> str:
    file.seek(0)
    try:
        content = json.loads(file.read())
        return f"process {content['pid']} on {content['host']} trains there"
    except (ValueError, KeyError, TypeError):
        return "another process trains there"


def meet_ranks(output_dir: Path, rank: int, count: int, timeout: float) -> str:
    """Wait until the first rank has seen all ranks, and return the name of the run, equal on all of them.

    Raises:
        RunFailed: names ranks that did not appear in time: they see another directory, or have not started.
    """
    directory = output_dir / DIRECTORY
    return _collect_tokens(directory, count, timeout) if rank == 0 else _send_token(directory, rank, timeout)


def _collect_tokens(directory: Path, count: int, timeout: float) -> str:
    """Collect the tokens on the first rank. Files of earlier runs are removed; ranks that started earlier write theirs again."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout
    tokens: dict[int, str] = {}
    name = secrets.token_hex(8)
    while len(tokens) < count - 1:
        for rank in set(range(1, count)) - tokens.keys():
            with suppress(OSError, ValueError, KeyError, TypeError):
                tokens[rank] = json.loads(_token_path(directory, rank).read_bytes())["token"]
        if len(tokens) < count - 1 and time.monotonic() > deadline:
            missing = list_ranks(set(range(1, count)) - tokens.keys())
            raise RunFailed(
                f"{missing} did not appear in {directory} within {timeout:.0f} s; output_dir must be a directory shared by "
                "all nodes"
            )
        time.sleep(POLL_SECONDS)
    with atomic_open(directory / ANSWER) as file:
        json.dump({"name": name, "tokens": list(tokens.values())}, file)
    return name


def _send_token(directory: Path, rank: int, timeout: float) -> str:
    token, deadline = secrets.token_hex(8), time.monotonic() + timeout
    while time.monotonic() < deadline:
        with suppress(OSError):  # the first rank may be removing the directory
            if not _token_path(directory, rank).exists():
                directory.mkdir(parents=True, exist_ok=True)
                with atomic_open(_token_path(directory, rank)) as file:
                    json.dump({"token": token, "host": socket.gethostname()}, file)
        with suppress(OSError, ValueError, KeyError, TypeError):
            answer = json.loads((directory / ANSWER).read_bytes())
            if token in answer["tokens"]:
                return answer["name"]
        time.sleep(POLL_SECONDS)
    raise RunFailed(
        f"rank 0 did not answer in {directory} on {socket.gethostname()} within {timeout:.0f} s; output_dir must be a "
        "directory shared by all nodes"
    )


def _token_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.json"


def claim_output_directory(config: RunConfig, ranks: Ranks, timeout: float = MEETING_TIMEOUT_SECONDS) -> Peers:
    """Claim ``output_dir`` for this run until the process ends, and return the ranks that write checkpoints there.

    Raises:
        UserError: another run is training there, or has left results and no option says what to do with them.
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
        UserError: the run has not saved a checkpoint.
    """
    if (newest := CheckpointStore(run / CHECKPOINTS).newest()) is None:
        raise UserError(f"{run}: the run has no checkpoint yet; pass a model, or wait for the first checkpoint")
    return newest


def describe_results(directory: Path) -> list[str]:
    """Return descriptions of the results of a run in ``directory``; empty if it has none."""
    newest = CheckpointStore(directory / CHECKPOINTS).newest()
    metrics = directory / METRICS_NAME
    steps = len(read_metrics(metrics)) if metrics.is_file() else 0
    results = [f"{steps} steps in {METRICS_NAME}"] if steps else []
    return [*results, f"checkpoint {newest.name}"] if newest else results


def require_no_results(config: RunConfig) -> None:
    """Raise if the directory has results of an earlier run, which a new run would overwrite.

    Raises:
        UserError: results exist, and neither ``resume_training`` nor ``overwrite`` is set.
    """
    directory = Path(config.output_dir)
    if config.resume_training is not False or config.overwrite or has_started(config):
        return
    if not (results := describe_results(directory)):
        return
    raise UserError(
        f"{directory} already has results ({' and '.join(results)}); pass --resume_training to continue, a different "
        "--output_dir, or --overwrite to discard them"
    )
