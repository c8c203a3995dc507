"""A run's recorded step beside its predicted one; and which directories below a given one hold a recording, of which rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.profiles.ascend_files import STEPS_FILE, read_ascend
from mindllm.profiles.compare import compare
from mindllm.profiles.recorded import RankRecord
from mindllm.profiles.report import ProfileReport
from mindllm.profiles.trace_records import read_trace
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device
from mindllm.timing.step import step_time

DEEPEST = 6
MOST = 4096  # directories of ranks; a run with more is looked at in parts
TRACE = "trace_view.json"
RANK_DIRECTORY = re.compile(r"rank[_-]?(\d{1,6})$")
RANK_FILE = re.compile(r"profiler_info_(\d{1,6})\.json$")
"""What MindSpore writes into the directory above ``ASCEND_PROFILER_OUTPUT``."""


def read_recording(directory: Path, steps: int = 1) -> tuple[list[RankRecord], list[str]]:
    """Read what a profiler left of one or several ranks.

    Args:
        directory: of one rank's files, or above those of several.
        steps: of a recording whose files do not tell its steps apart.

    Returns:
        A record for each rank, and what must be said of them.

    Raises:
        UserError: no file of a profiler is there, or one of them is of another form.
    """
    if directory.is_file():
        record = read_trace(directory, rank_of(directory, directory.parent), steps)
        return [record], list(record.notes)
    if not directory.is_dir():
        raise UserError(f"{directory}: neither a directory nor a trace; give that of a profile, such as output/profile")
    by_rank: dict[int, list[Path]] = {}
    notes = []
    unnamed = 0
    for found in _below(directory):
        rank = rank_of(found.parent, directory)
        if rank is None:
            rank, unnamed = unnamed, unnamed + 1
            notes.append(f"{found}: its rank is not said; taken for rank {rank}")
        by_rank.setdefault(rank, []).append(found)
    records = []
    for rank, files in sorted(by_rank.items()):
        latest = max(files, key=lambda file: (file.lstat().st_mtime, str(file)))
        if len(files) > 1:
            notes.append(f"rank {rank}: {len(files)} recordings; the latest is read, {latest.parent}")
        of_devices = latest.name == STEPS_FILE
        records.append(read_ascend(latest.parent, rank, steps) if of_devices else read_trace(latest, rank, steps))
        notes += records[-1].notes
    if not records:
        raise UserError(
            f"{directory}: has no {STEPS_FILE} and no {TRACE}, here or below; give a directory that MindSpore's profiler wrote "
            "(profile: true)"
        )
    return records, notes


def _recording(files: Sequence[str]) -> Iterator[str]:
    """Yield the file that makes a directory a recording: the steps of a device, or else the trace."""
    yield from [name for name in (STEPS_FILE, TRACE) if name in files][:1]


def _below(directory: Path) -> Iterator[Path]:
    """The first file of every recording, in order of their names; links are not followed."""
    found = 0
    depth = len(directory.parts)
    for place, inside, files in os.walk(directory):
        inside.sort()
        if len(Path(place).parts) - depth >= DEEPEST:
            inside.clear()
        for name in _recording(files):
            found += 1
            if found > MOST:
                raise UserError(f"{directory}: more than {MOST} recordings below; give a directory with fewer")
            yield Path(place) / name


def rank_of(place: Path, top: Path) -> int | None:
    """Return whose recording it is: by MindSpore's ``profiler_info_N.json`` beside it, or by a directory ``rank_N``."""
    for beside in (place, place.parent):
        for file in sorted(beside.glob("profiler_info_*.json")):
            if named := RANK_FILE.search(file.name):
                return int(named[1])
    for name in reversed(place.relative_to(top.parent).parts):
        if named := RANK_DIRECTORY.search(name):
            return int(named[1])
    return None


def left_out(records: Sequence[RankRecord], devices: int) -> str:
    """Return which ranks of a run were not recorded; empty: all were."""
    missing = devices - len(records)
    return f"{missing} of {devices} ranks were not recorded: they are taken to be as predicted" if missing else ""


def explain_profile(config: RunConfig, directory: Path, device: Device, steps: int | None = None) -> ProfileReport:
    """Say where the recorded step of a run differs from the predicted one.

    Args:
        config: the run that was recorded.
        directory: of one rank's files of MindSpore's profiler, or above those of several.
        device: that it ran on.
        steps: of a recording whose files do not tell them apart; None: those of ``profile_start_step`` and ``profile_stop_step``.

    Raises:
        UserError: the run has something that is not modelled, or a file is of another form.
    """
    step = step_time(workload_of(config), device)
    told = 1 + config.profile_stop_step - config.profile_start_step if config.profile else 1
    records, notes = read_recording(directory, steps or max(1, told))
    if len({record.steps for record in records}) == 1 and records[0].steps == (steps or told) > 1:
        notes.append(f"a recording is taken to hold {records[0].steps} steps where its files do not tell them apart")
    missing = left_out(records, step.workload.strategy.device_num)
    return ProfileReport(compare(step, records), tuple([*notes, missing] if missing else notes))
