"""Read traces in Chrome's trace-event form (MindSpore's ``trace_view.json``): slices, and sums over intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.errors import UserError, shortened
from mindllm.outside import read_json
from mindllm.units import MIB

MOST = 128 * MIB  # a tree of it takes some gigabytes
STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
LONGEST = 1e18  # microseconds since 1970 are 2e15
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Slice:
    """Something that began and ended, in seconds; ``row`` is its process and thread."""

    name: str
    category: str
    row: tuple[str, str]
    start: float
    seconds: float
    arguments: dict[str, Any]

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.seconds


@dataclass(frozen=True)
class Trace:
    """A trace: its slices and the names of its processes."""

    slices: Sequence[Slice]
    processes: dict[str, str]

    def of(self, process: str) -> list[Slice]:
        """Return the slices of processes of a name."""
        return [one for one in self.slices if self.processes.get(one.row[0]) == process]


def read_trace_events(file: Path) -> Trace:
    """Read a trace.

    Raises:
        UserError: it cannot be read, is too large, is no trace, or a time is no number.
    """
    try:
        tree = read_json(file, MOST)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    events = tree.get("traceEvents") if isinstance(tree, dict) else tree
    if not isinstance(events, list):
        raise UserError(f"{file}: has no traceEvents: it is no trace of a profiler")
    slices, processes = [], {}
    first = _first(file, events)
    for event in events:
        if not isinstance(event, dict):
            continue
        told = event.get("args") if isinstance(event.get("args"), dict) else {}
        if event.get("ph") == "M" and event.get("name") == "process_name" and told:
            processes[str(event.get("pid"))] = str(told.get("name"))
        elif event.get("ph") == "X":
            row = str(event.get("pid")), str(event.get("tid"))
            start, seconds = _time(file, event, "ts") - first, _time(file, event, "dur")
            name, category = str(event.get("name")), str(event.get("cat") or "")
            slices.append(Slice(name, category, row, MICROSECOND * start, MICROSECOND * seconds, told or {}))
    if not slices:
        raise UserError(f"{file}: has no slice with a beginning and an end: it is no trace of a profiler")
    return Trace(slices, processes)


def _first(file: Path, events: Sequence[Any]) -> float:
    """The earliest time: seconds since then have digits to spare."""
    return min(
        (_time(file, one, "ts") for one in events if isinstance(one, dict) and one.get("ph") == "X"), default=0.0
    )


def _time(file: Path, event: dict[str, Any], key: str) -> float:
    """Microseconds; MindSpore writes them as text."""
    given = event.get(key)
    try:
        value = math.nan if isinstance(given, bool) or given is None else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 <= value <= LONGEST:
        name = shortened(str(event.get("name")))
        raise UserError(f"{file}: {name}: {key} must be microseconds from 0 on (value {shortened(repr(given)[:200])})")
    return value


def steps_of(slices: Iterable[Slice]) -> list[tuple[float, float]]:
    """Return beginning and end of every marked step but the first, which also warms up; of one alone, its own."""
    marked = sorted((one.start, one.end) for one in slices if STEP.search(one.name))
    return marked[1:] if len(marked) > 1 else marked


Intervals = np.ndarray
"""Beginnings and ends that do not overlap, in order, ``[n, 2]`` in seconds."""


def united(slices: Iterable[Slice], within: tuple[float, float]) -> Intervals:
    """Return the union of slices inside a window."""
    least, most = within
    pairs = sorted(
        (max(one.start, least), min(one.end, most)) for one in slices if one.end > least and one.start < most
    )
    found: list[list[float]] = []
    for start, end in pairs:
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return np.array(found).reshape(-1, 2)


def length(intervals: Intervals) -> float:
    """Return the seconds of intervals."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())
