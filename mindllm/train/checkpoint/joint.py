"""Processes that save one checkpoint together through the file system they share, without any other way to reach each other.

Each writes its own files into one hidden directory, then a report that lists them. The first process waits for all reports; only
when every one is there does it write the manifest and make the checkpoint visible. The others learn the outcome from the disk:
the checkpoint has their files, or the hidden directory is marked as given up.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindllm.files import atomic_open
from mindllm.outside import read_json
from mindllm.train.checkpoint.manifest import DamagedCheckpointError, FileEntry, read_manifest

POLL_SECONDS = 0.05
SAVE_TIMEOUT_SECONDS = 1800.0
MOST_NAMED = 8
GIVEN_UP = "given_up"


def everybody(answer: bool) -> bool:
    """The agreement of a process that is alone."""
    return answer


@dataclass(frozen=True)
class Peers:
    """The processes of a run that share a checkpoint: process ``rank`` of ``count``.

    Args:
        token: the same text in all processes and of this run alone; names what they write together.
        agree: whether all processes say yes; every process calls it, in the same order.
        timeout: seconds that one waits for the others while a checkpoint is saved.
    """

    rank: int = 0
    count: int = 1
    token: str = ""
    agree: Callable[[bool], bool] = everybody
    timeout: float = SAVE_TIMEOUT_SECONDS

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def hidden(self, final: Path, attempt: int) -> Path:
        """The directory in which all of them write ``final`` at the ``attempt``-th save of this run."""
        name = hashlib.sha256(f"{self.token}:{final.name}:{attempt}".encode()).hexdigest()[:8]
        return final.with_name(f".{final.name}.saving-{name}")


SINGLE_RANK = Peers()


def report(directory: Path, rank: int, files: Iterable[FileEntry] = (), problem: str = "") -> None:
    """Says that ``rank`` has written ``files``, or why it could not.

    Raises:
        OSError: not even that could be written.
    """
    content = {"files": [asdict(entry) for entry in files], "problem": problem}
    with atomic_open(_report_path(directory, rank)) as file:
        json.dump(content, file)


def collect(directory: Path, peers: Peers) -> tuple[FileEntry, ...]:
    """Waits for the reports of the other ranks, removes them, and returns the files they list.

    Raises:
        OSError: a rank could not write its part, or has not reported in time; names the ranks.
    """
    missing, files = set(range(1, peers.count)), []
    deadline = time.monotonic() + peers.timeout
    while missing:
        for rank in sorted(missing):
            content = _read_report(_report_path(directory, rank))
            if content is None:
                continue
            if content["problem"]:
                raise OSError(f"rank {rank} could not write its part: {content['problem']}")
            files += [(rank, FileEntry(**entry)) for entry in content["files"]]
            missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise OSError(
                f"{named(missing)} did not write into {directory} within {peers.timeout:.0f} s; every node must see the same "
                "directory"
            )
        if missing:
            time.sleep(POLL_SECONDS)
    for rank, entry in files:
        if not (directory / entry.name).is_file():
            raise OSError(f"{directory / entry.name}, which rank {rank} has written, is not visible to rank 0")
    for rank in range(1, peers.count):
        _report_path(directory, rank).unlink()
    return tuple(entry for _, entry in files)


def give_up(directory: Path) -> None:
    """Empties the directory of a checkpoint that cannot be whole, and marks it for ranks that come late."""
    with suppress(OSError):
        (directory / GIVEN_UP).mkdir()
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name != GIVEN_UP:
            path.unlink(missing_ok=True)


def refuse_given_up(directory: Path) -> None:
    """Raises OSError when the first rank has given the checkpoint up."""
    if (directory / GIVEN_UP).exists():
        raise OSError("rank 0 has given it up; its log says why")


def await_outcome(directory: Path, final: Path, own: Iterable[FileEntry], peers: Peers) -> None:
    """Waits until the first rank has made the checkpoint visible.

    Raises:
        OSError: it has given up, or takes too long.
    """
    deadline = time.monotonic() + 2 * peers.timeout  # the first rank waits for others, too
    while directory.exists():
        refuse_given_up(directory)
        if time.monotonic() > deadline:
            raise OSError(f"rank 0 has not finished it within {2 * peers.timeout:.0f} s")
        time.sleep(POLL_SECONDS)
    with suppress(DamagedCheckpointError):
        if set(own) <= set(read_manifest(final).files):
            return
    raise OSError("rank 0 has given it up; its log says why")


def named(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 1, 2, 5``; of many the first few."""
    found = sorted(ranks)
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:MOST_NAMED]))}{more}"


def _report_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.json"


def _read_report(path: Path) -> Mapping[str, Any] | None:
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
