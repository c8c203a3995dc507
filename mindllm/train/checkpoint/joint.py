"""Joint saves: several processes write one checkpoint and communicate through the shared file system only.

Each process writes its files into one hidden directory, then a report that lists them. The first process waits for all reports
before it writes the manifest and publishes the checkpoint. The others learn the outcome from the disk: either the checkpoint
lists their files, or the hidden directory is marked as abandoned.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mindllm.files import atomic_open
from mindllm.outside import read_json
from mindllm.train.checkpoint.manifest import DamagedCheckpointError, FileEntry, read_manifest

POLL_SECONDS = 0.05
SAVE_TIMEOUT_SECONDS = 1800.0
MOST_LISTED = 8
ABANDONED = "given_up"  # a directory; its name is part of the format


@dataclass(frozen=True)
class Peers:
    """The processes of a run that share a checkpoint: process ``rank`` of ``count``.

    Args:
        token: a text that identifies this run, equal in all processes; it names their common directory.
        agree: returns True if all processes pass True. Every process calls it, in the same order.
        timeout: seconds to wait for other processes during a save.
    """

    rank: int = 0
    count: int = 1
    token: str = ""
    agree: Callable[[bool], bool] = bool
    timeout: float = SAVE_TIMEOUT_SECONDS

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def hidden(self, final: Path, attempt: int) -> Path:
        """Return the common directory for the ``attempt``-th save of this run, which becomes ``final``."""
        name = hashlib.sha256(f"{self.token}:{final.name}:{attempt}".encode()).hexdigest()[:8]
        return final.with_name(f".{final.name}.saving-{name}")


SINGLE_RANK = Peers()


def report(directory: Path, rank: int, files: Iterable[FileEntry] = (), problem: str = "") -> None:
    """Write a report: the files of ``rank``, or the problem that prevented them.

    Raises:
        OSError: the report could not be written.
    """
    content = {"files": [asdict(entry) for entry in files], "problem": problem}
    with atomic_open(_report_path(directory, rank)) as file:
        json.dump(content, file)


def collect(directory: Path, peers: Peers) -> tuple[FileEntry, ...]:
    """Wait for the reports of the other ranks, remove them, and return the files they list.

    Raises:
        OSError: a rank could not write its part or did not report in time; names the ranks.
    """
    missing, files = set(range(1, peers.count)), []
    deadline = time.monotonic() + peers.timeout
    while missing:
        for rank in sorted(missing):
            try:
                content = read_json(_report_path(directory, rank))
            except FileNotFoundError:
                continue
            if content["problem"]:
                raise OSError(f"rank {rank} could not write its part: {content['problem']}")
            files += [(rank, FileEntry(**entry)) for entry in content["files"]]
            missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise OSError(
                f"{list_ranks(missing)} did not write into {directory} within {peers.timeout:.0f} s; every node must see the "
                "same directory"
            )
        if missing:
            time.sleep(POLL_SECONDS)
    for rank, entry in files:
        if not (directory / entry.name).is_file():
            raise OSError(f"{directory / entry.name}, which rank {rank} has written, is not visible to rank 0")
    for rank in range(1, peers.count):
        _report_path(directory, rank).unlink()
    return tuple(entry for _, entry in files)


def abandon(directory: Path) -> None:
    """Empty the directory of an incomplete checkpoint and mark it for late ranks."""
    with suppress(OSError):
        (directory / ABANDONED).mkdir()
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name != ABANDONED:
            path.unlink(missing_ok=True)


def check_abandoned(directory: Path) -> None:
    """Raise OSError if the first rank has abandoned the checkpoint."""
    if (directory / ABANDONED).exists():
        raise OSError("rank 0 has abandoned it; see its log for the reason")


def await_outcome(directory: Path, final: Path, files: Iterable[FileEntry], peers: Peers) -> None:
    """Wait until the first rank has published the checkpoint with ``files``.

    Raises:
        OSError: the first rank has abandoned it or takes too long.
    """
    deadline = time.monotonic() + 2 * peers.timeout  # the first rank itself waits for others
    while directory.exists():
        check_abandoned(directory)
        if time.monotonic() > deadline:
            raise OSError(f"rank 0 has not finished it within {2 * peers.timeout:.0f} s")
        time.sleep(POLL_SECONDS)
    with suppress(DamagedCheckpointError):
        if set(files) <= set(read_manifest(final).files):
            return
    raise OSError("rank 0 has abandoned it; see its log for the reason")


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 2, 5``, listing the first few of many."""
    numbers = sorted(ranks)
    more = f" and {len(numbers) - MOST_LISTED} more" if len(numbers) > MOST_LISTED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:MOST_LISTED]))}{more}"


def _report_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.json"
