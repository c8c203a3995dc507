"""All ranks find each other in the output directory before a run begins: proof that it is one directory, seen by every node.

Each rank writes a file with a number drawn at random; the first one gathers them and answers with all of them and a name for the
run. A rank that finds its own number in the answer sees what the first rank sees, and is not looking at an earlier run's files.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from mindllm.errors import RunFailed
from mindllm.files import atomic_open
from mindllm.train.checkpoint.joint import named

DIRECTORY = ".ranks"
ANSWER = "all.json"
POLL_SECONDS = 0.05


def call_roll(output_dir: Path, rank: int, count: int, timeout: float) -> str:
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
            with suppress(OSError, ValueError, KeyError):
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
        with suppress(OSError, ValueError, KeyError):
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
