"""The files of MindSpore's profiler for one rank of Ascend devices.

Their form is that of MindSpore 2.10's own writers (``mindspore/profiler/analysis/viewer``) and of CANN's documentation;
no file of a device was at hand. Times in CSVs are microseconds, in ``communication.json`` milliseconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mindllm.errors import UserError, shortened
from mindllm.outside import read_json, read_rows
from mindllm.profiles.recorded import RECEIVED, SENT, Collective, Kernel, LinkRate, Ran, RankRecord, StepParts
from mindllm.timing.measured.kernel_file import COLUMNS, CORE, DURATION, SHAPES, TYPE, operator_of

STEPS_FILE, KERNELS_FILE, EXCHANGES_FILE = "step_trace_time.csv", "kernel_details.csv", "communication.json"
STEP, STEP_ID, NAME, WAIT = "Step", "Step ID", "Name", "Wait Time(us)"
COMPUTING, EXPOSED, FREE = "Computing", "Communication(Not Overlapped)", "Free"
OVERLAPPED, BUBBLE, PREPARING = "Overlapped", "Bubble", "Preparing"
TIMES, BANDWIDTHS = "Communication Time Info", "Communication Bandwidth Info"
ELAPSED, WAITED, SIZE = "Elapse Time(ms)", "Wait Time(ms)", "Transit Size(MB)"
WHOLE_OF = {"SDMA": ("HCCS", "PCIE", "SIO")}  # transports that msprof adds up under another name
TOTAL = "Total"
EXCHANGE_CORES = ("HCCL", "COMMUNICATION")
MICROSECOND, MILLISECOND, MEGABYTE = 1e-6, 1e-3, 1e6
LONGEST = 1e15  # microseconds; more is no time
MATRIX_FILE = "communication_matrix.json"
WHOLE_RUN, TRANSPORT, RATE, GIGABYTE = "-total@", "Transport Type", "Bandwidth(GB/s)", 1e9
OPS = {
    "allreduce": "AllReduce",
    "allgather": "AllGather",
    "reducescatter": "ReduceScatter",
    "alltoall": "AlltoAll",
    "broadcast": "Broadcast",
    "receive": RECEIVED,
    "recv": RECEIVED,
    "send": SENT,
}
"""Kinds of exchanges by what their names contain: ``hcom_allReduce__123_0_1@group``, ``Default/AllReduce-op3@group``."""


@dataclass(frozen=True)
class _Rows:
    """Kernels or exchanges by the step they are said to be in; one key alone: of all steps together."""

    by_step: Mapping[str, list[Any]]

    def of(self, steps: Sequence[str], recorded: int) -> Ran:
        """Return what ran in some steps; where steps are not told apart, in all that were recorded."""
        kept = [step for step in self.by_step if step in steps]
        if kept and len(self.by_step) > 1:
            return Ran([one for step in kept for one in self.by_step[step]], len(kept))
        return Ran([one for rows in self.by_step.values() for one in rows], max(recorded, len(self.by_step)))


def read_ascend(directory: Path, rank: int, steps: int = 1) -> RankRecord:
    """Read the recording of one rank; the first of several steps, which also warms up, is left out.

    Args:
        directory: with ``step_trace_time.csv``.
        rank: whose it is.
        steps: that a recording holds which does not tell its steps apart.

    Raises:
        UserError: a file is of another form, or a time is no number.
    """
    names, rows = _steps(directory / STEPS_FILE)
    kept, parts = (names[1:], rows[1:]) if len(rows) > 1 else (names, rows)
    apart, share = (len(rows), len(parts)) if len(rows) > 1 else (steps, steps)
    mean = StepParts(**{one.name: sum(getattr(row, one.name) for row in parts) / share for one in fields(StepParts)})
    if not mean.seconds > 0:
        raise UserError(f"{directory / STEPS_FILE}: its steps take no time; profile one whole step at least")
    kernels, exchanges = _kernels(directory / KERNELS_FILE), _exchanges(directory / EXCHANGES_FILE)
    if exchanges is None and kernels is not None:
        exchanges = _exchange_kernels(directory / KERNELS_FILE)
    notes = [f"{directory / KERNELS_FILE}: not there"] if kernels is None else []
    notes += [f"{directory / EXCHANGES_FILE}: not there"] if exchanges is None and mean.exposed + mean.hidden else []
    return RankRecord(
        rank, directory, mean, share,
        kernels.of(kept, apart) if kernels else None,
        exchanges.of(kept, apart) if exchanges else None,
        tuple(notes), tuple(_links(directory / MATRIX_FILE)),
    )  # fmt: skip


def _steps(file: Path) -> tuple[list[str], list[StepParts]]:
    """The steps of a recording by their names."""
    rows = list(_rows(file, (COMPUTING, EXPOSED, FREE)))
    if not rows:
        raise UserError(f"{file}: has no step; profile one whole step at least")
    return [row.get(STEP, "") for _, row in rows], [_parts(file, line, row) for line, row in rows]


def _parts(file: Path, line: int, row: Mapping[str, str]) -> StepParts:
    def of(name: str, optional: bool = False) -> float:
        return _time(file, line, row, name, optional)

    return StepParts(of(COMPUTING), of(EXPOSED), of(OVERLAPPED, True), of(FREE), of(BUBBLE, True), of(PREPARING, True))


def _kernels(file: Path) -> _Rows | None:
    if not os.path.lexists(file):
        return None
    found: dict[str, list[Any]] = {}
    for line, row in _rows(file, COLUMNS):
        if not _is_exchange(row):
            seconds = _time(file, line, row, DURATION)
            waited = _time(file, line, row, WAIT, optional=True)
            kernel = Kernel(row.get(NAME, ""), row[TYPE], seconds, operator_of(row), row.get(SHAPES, ""), waited)
            found.setdefault(row.get(STEP_ID, ""), []).append(kernel)
    return _Rows(found)


def _exchange_kernels(file: Path) -> _Rows | None:
    """Exchanges among the kernels, where there is no file of them; what of these is waiting is not known."""
    found: dict[str, list[Any]] = {}
    for line, row in _rows(file, COLUMNS):
        if _is_exchange(row):
            name = row.get(NAME, "") or row[TYPE]
            one = Collective(kind_of(row[TYPE]) or row[TYPE], _group(name), _time(file, line, row, DURATION))
            found.setdefault(row.get(STEP_ID, ""), []).append(one)
    return _Rows(found) if found else None


def _is_exchange(row: Mapping[str, str]) -> bool:
    return row[CORE] in EXCHANGE_CORES or row[TYPE].lower().startswith("hcom_")


def kind_of(name: str) -> str:
    """Return the kind of an exchange by its name; empty where it is none that is known."""
    plain = name.partition("@")[0].rpartition("/")[2].lower().replace("_", "")
    return next((op for text, op in OPS.items() if text in plain), "")


def _group(name: str) -> str:
    return name.partition("@")[2]


def _exchanges(file: Path) -> _Rows | None:
    """``communication.json``: steps, in each exchanges between two ranks and of groups, by their names."""
    if not os.path.lexists(file):
        return None
    found: dict[str, list[Any]] = {}
    for step, kinds in _mapping(file, "", _json(file)).items():
        own = found.setdefault(str(step).removeprefix("step"), [])
        for kind, operations in _mapping(file, step, kinds).items():
            for name, told in _mapping(file, f"{step}: {kind}", operations).items():
                if not name.startswith(TOTAL):
                    own.append(_exchange(file, name, _mapping(file, name, told)))
    return _Rows(found)


def _links(file: Path) -> Iterator[LinkRate]:
    """``communication_matrix.json``: of every kind and group, what its exchanges reached over each link, the totals alone."""
    if not os.path.lexists(file):
        return
    for step, kinds in _mapping(file, "", _json(file)).items():
        for kind, groups in _mapping(file, step, kinds).items():
            for name, links in _mapping(file, f"{step}: {kind}", groups).items():
                if WHOLE_RUN not in name:
                    continue
                for link, told in _mapping(file, name, links).items():
                    one = _mapping(file, f"{name}: {link}", told)
                    rate = GIGABYTE * _number(file, f"{name}: {link}: {RATE}", one.get(RATE, 0.0))
                    yield LinkRate(kind_of(name), _group(name), link, str(one.get(TRANSPORT, "")), rate)


def _json(file: Path) -> Any:
    try:
        return read_json(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def _exchange(file: Path, name: str, told: Mapping[str, Any]) -> Collective:
    times = _mapping(file, name, told.get(TIMES, {}))
    elapsed, waited = (_number(file, f"{name}: {key}", times.get(key, 0.0)) for key in (ELAPSED, WAITED))
    sizes = {
        transport: _number(file, f"{name}: {transport}: {SIZE}", _mapping(file, transport, one).get(SIZE, 0.0))
        for transport, one in _mapping(file, name, told.get(BANDWIDTHS, {})).items()
    }
    for whole, parts in WHOLE_OF.items():
        if sizes.get(whole, 0.0) > 0:
            sizes = {transport: size for transport, size in sizes.items() if transport not in parts}
    seconds = MILLISECOND * elapsed
    return Collective(
        kind_of(name) or name.partition("@")[0], _group(name), seconds, min(seconds, MILLISECOND * waited),
        MEGABYTE * sum(sizes.values()),
    )  # fmt: skip


def _rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    try:
        rows = read_rows(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    for name in columns if rows else ():
        if name not in rows[0]:
            raise UserError(
                f"{file}: has no column {name}: it is not a {file.name}, or of another version of the profiler"
            )
    yield from enumerate(rows, 2)


def _time(file: Path, line: int, row: Mapping[str, str], name: str, optional: bool = False) -> float:
    """Microseconds of a column as seconds; an ``optional`` one may be empty or not there."""
    text = (row.get(name) or "").strip()
    if optional and not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST:
        raise UserError(f"{file}:{line}: {name} must be microseconds from 0 on (value {shortened(text)})")
    return MICROSECOND * value


def _number(file: Path, what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
        raise UserError(f"{file}: {shortened(what)} must be a number from 0 on (value {shortened(repr(value)[:200])})")
    return float(value)


def _mapping(file: Path, what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{file}: {shortened(what)}: not an object: it is not a {file.name} of MindSpore's profiler")
    return value
