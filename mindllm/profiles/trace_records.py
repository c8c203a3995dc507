"""Read the record of a rank from ``trace_view.json``, MindSpore's trace in Chrome's trace-event form.

On a device the lanes are used in which MindSpore's writer has summed up the step. On a CPU there are operators by name, without
shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mindllm.errors import UserError
from mindllm.profiles.ascend_files import kind_of
from mindllm.profiles.chrome_trace import Slice, Trace, length, read_trace_events, steps_of, united
from mindllm.profiles.recorded import RECEIVED, SENT, Collective, Kernel, Ran, RankRecord, StepParts

LANES, EXCHANGES, CPU = "Overlap Analysis", ("HCCL", "Communication"), "CPU OP"


def read_trace(file: Path, rank: int | None, steps: int = 1) -> RankRecord:
    """Read the trace of one rank.

    Args:
        file: JSON in Chrome's trace-event form.
        rank: of the process that was recorded; None: 0.
        steps: that a trace without marked steps holds.

    Raises:
        UserError: the file is not a trace of a profiler, or a time is not a number.
    """
    trace = read_trace_events(file)
    number = 0 if rank is None else rank
    windows = steps_of(trace.slices)
    count = len(windows) or steps
    ends = (min(one.start for one in trace.slices), max(one.end for one in trace.slices))
    window = (windows[0][0], windows[-1][1]) if windows else ends
    lanes = [one for one in trace.of(LANES) if _starts(one, window)]
    if lanes:
        return _sum_lanes(file, number, trace, lanes, window, count)
    if not window[1] > window[0]:
        raise UserError(f"{file}: its steps take no time; profile one whole step at least")
    operators = [one for one in trace.of(CPU) if _starts(one, window)]
    if not operators:
        raise UserError(f"{file}: no operators in its steps; profile with the activities of the device")
    busy = length(united(operators, window))
    parts = StepParts(busy / count, 0.0, 0.0, (window[1] - window[0] - busy) / count, 0.0)
    kernels = [_kernel(one) for one in _without_callees(operators)]
    notes = () if windows else (f"{file}: marks no steps; taken to hold {count}",)
    return RankRecord(number, file, parts, count, Ran(kernels, count), Ran([], count), notes)


def _starts(one: Slice, window: tuple[float, float]) -> bool:
    return window[0] <= one.start < window[1]


def _sum_lanes(
    file: Path, rank: int, trace: Trace, lanes: Sequence[Slice], window: tuple[float, float], count: int
) -> RankRecord:
    """Sum up the lanes in which MindSpore separates computation, exchanges and idle time."""

    def of(name: str) -> float:
        return sum(one.seconds for one in lanes if one.name == name) / count

    exchanges = [one for process in EXCHANGES for one in trace.of(process) if _starts(one, window)]
    collectives = [Collective(kind_of(one.name) or one.name, "", one.seconds) for one in exchanges if kind_of(one.name)]
    between = sum(one.seconds for one in collectives if one.op in (SENT, RECEIVED)) / count
    exposed = of("Communication(Not Overlapped)")
    busy = length(united([one for one in lanes if one.name != "Free"], window))
    free = max(of("Free"), (window[1] - window[0] - busy) / count)
    parts = StepParts(of("Computing"), exposed, of("Communication") - exposed, free, between)
    return RankRecord(rank, file, parts, count, None, Ran(collectives, count) if collectives else None, (
        f"{file}: kernels have no shapes in a trace; give the directory of kernel_details.csv",
    ))  # fmt: skip


def _without_callees(slices: Sequence[Slice]) -> Iterator[Slice]:
    """Yield operators of the host with the seconds of operators that they call subtracted."""
    rows: dict[tuple[str, str], list[Slice]] = {}
    for one in slices:
        rows.setdefault(one.row, []).append(one)
    for row in rows.values():
        open_calls: list[tuple[Slice, list[float]]] = []
        for one in sorted(row, key=lambda each: (each.start, -each.end)):
            while open_calls and one.start >= open_calls[-1][0].end:
                yield _own_time(*open_calls.pop())
            if open_calls:
                open_calls[-1][1].append(one.seconds)
            open_calls.append((one, []))
        while open_calls:
            yield _own_time(*open_calls.pop())


def _own_time(one: Slice, callees: Sequence[float]) -> Slice:
    return Slice(one.name, one.category, one.row, one.start, max(0.0, one.seconds - sum(callees)), one.arguments)


def _kernel(one: Slice) -> Kernel:
    """Return an operator of the CPU back end, whose trace has no shapes."""
    kind = one.name.rpartition("/")[2].partition("-op")[0][:200]
    return Kernel(one.name, kind, one.seconds, f"{kind}: no shapes in a trace of MindSpore")
