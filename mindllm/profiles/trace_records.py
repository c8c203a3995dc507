"""Records of ranks from traces: Kineto's (``torch.profiler``), and ``trace_view.json`` of MindSpore.

Kineto has shapes with ``record_shapes=True``; a kernel of a device has those of the operator with its ``External id``. On a CPU
operators are the kernels, each without what it calls. Elementwise operators are taken to read their operands and to write as
much as the largest of them. Of MindSpore's traces on a device the lanes are used in which its own writer has added up the step;
on a CPU there are operators by name, without shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.profiles.ascend_files import kind_of
from mindllm.profiles.chrome_trace import Slice, Trace, length, read_trace_events, steps_of, united
from mindllm.profiles.recorded import RECEIVED, SENT, Collective, Kernel, Ran, RankRecord, StepParts
from mindllm.timing.costs.attention import seen_keys
from mindllm.timing.costs.layer import FLASH_BACKWARD
from mindllm.timing.costs.work import ATTENTION, MATRIX, VECTOR, Operator

LANES, MINDSPORE, EXCHANGES, CPU = "Overlap Analysis", "MindSpore", ("HCCL", "Communication"), "CPU OP"
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
OPERATORS = "cpu_op"
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Products of matrices, and which of their operands is the first."""
ATTENTIONS = ("scaled_dot_product", "flash_attention", "efficient_attention")
VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "t",
            "transpose",
            "as_strided",
            "view",
            "_unsafe_view",
            "expand",
            "reshape",
            "permute",
            "select",
            "slice",
            "unsqueeze",
        ),
        *(
            "squeeze",
            "alias",
            "detach",
            "empty",
            "empty_like",
            "empty_strided",
            "resolve_conj",
            "resolve_neg",
            "result_type",
        ),
    )
)
CALLS = "calls others"
TYPES = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32"}
BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "int": 4, "bool": 1}
LARGEST = 2**40  # numbers of a tensor
MOST_DIMENSIONS = 8  # of any tensor that an operator of a training step takes
DIMENSIONS = 4  # of queries and keys


def read_trace(file: Path, rank: int | None, steps: int = 1) -> RankRecord:
    """Read the trace of one rank.

    Args:
        file: JSON in Chrome's form, compressed or not.
        rank: whose it is; None: what the trace says, or 0.
        steps: that a trace without marked steps holds.

    Raises:
        UserError: it is no trace of a profiler, or a time is no number.
    """
    trace = read_trace_events(file)
    told = trace.beside.get("distributedInfo")
    said = told.get("rank") if isinstance(told, dict) else None
    number = rank if rank is not None else said if isinstance(said, int) and 0 <= said < 10**6 else 0
    windows = steps_of(one for one in trace.slices if one.category == "gpu_user_annotation") or steps_of(trace.slices)
    count = len(windows) or steps
    ends = (min(one.start for one in trace.slices), max(one.end for one in trace.slices))
    window = (windows[0][0], windows[-1][1]) if windows else ends
    lanes = [one for one in trace.of(LANES) if _starts(one, window)]
    if lanes:
        return _of_lanes(file, number, trace, lanes, window, count)
    if not window[1] > window[0]:
        raise UserError(f"{file}: its steps take no time; profile one whole step at least")
    slices = [one for one in _running(trace) if _starts(one, window)]
    if not slices:
        raise UserError(
            f"{file}: has neither kernels nor operators in its steps; profile with the activities of the device"
        )
    parts, kernels, collectives = _summed(slices, _by_identity(trace), window, count)
    notes = [] if windows else [f"{file}: marks no steps; taken to hold {count}"]
    return RankRecord(number, file, parts, count, Ran(kernels, count), Ran(collectives, count), tuple(notes))


def _starts(one: Slice, window: tuple[float, float]) -> bool:
    return window[0] <= one.start < window[1]


def _of_lanes(
    file: Path, rank: int, trace: Trace, lanes: Sequence[Slice], window: tuple[float, float], count: int
) -> RankRecord:
    """The sums of MindSpore's own lanes."""

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


def _running(trace: Trace) -> list[Slice]:
    """The kernels of a device; where none ran on one, operators of the host, which lie inside each other."""
    kernels = [one for one in trace.slices if one.category in KERNELS]
    return kernels or [one for one in trace.slices if one.category == OPERATORS] or trace.of(CPU)


def _by_themselves(slices: Sequence[Slice]) -> Iterator[Slice]:
    """Yield slices of threads, which lie inside each other, with their own seconds alone."""
    rows: dict[tuple[str, str], list[Slice]] = {}
    for one in slices:
        rows.setdefault(one.row, []).append(one)
    for row in rows.values():
        inside: list[tuple[Slice, list[float]]] = []
        for one in sorted(row, key=lambda each: (each.start, -each.end)):
            while inside and one.start >= inside[-1][0].end:
                yield _alone(*inside.pop())
            if inside:
                inside[-1][1].append(one.seconds)
            inside.append((one, []))
        while inside:
            yield _alone(*inside.pop())


def _alone(one: Slice, called: Sequence[float]) -> Slice:
    """What it takes by itself; of an operator that is made of others that is no work of its shapes."""
    made_of_others = bool(called) and one.name not in PRODUCTS and not _is_attention(one.name)
    arguments = {CALLS: True} if made_of_others else one.arguments
    return Slice(one.name, one.category, one.row, one.start, max(0.0, one.seconds - sum(called)), arguments)


def _is_attention(name: str) -> bool:
    return any(text in name for text in ATTENTIONS)


def _by_identity(trace: Trace) -> dict[str, Slice]:
    """Operators of the host by their ``External id``."""
    return {str(one.arguments.get("External id")): one for one in trace.slices if one.category == OPERATORS}


def _summed(
    slices: Sequence[Slice], operators: dict[str, Slice], window: tuple[float, float], count: int
) -> tuple[StepParts, list[Kernel], list[Collective]]:
    collectives = [one for one in slices if one.name.startswith(("ncclKernel", "ncclDevKernel"))]
    is_one = {id(one) for one in collectives}
    kernels = [one for one in slices if id(one) not in is_one]
    computing, exchanging = length(united(kernels, window)), length(united(collectives, window))
    busy = length(united(slices, window))
    hidden = computing + exchanging - busy
    whole = window[1] - window[0]
    exchanges = [_collective(one) for one in collectives]
    between = sum(one.seconds for one in exchanges if one.op in (SENT, RECEIVED))
    parts = StepParts(*(one / count for one in (computing, exchanging - hidden, hidden, whole - busy, between)))
    on_device = bool(kernels) and kernels[0].category in KERNELS
    each = kernels if on_device else _by_themselves(kernels)
    return parts, [_kernel(one, operators) for one in each], exchanges


def _collective(one: Slice) -> Collective:
    """What waits for other ranks is not in a trace; a kernel of Sends and Receives is called a Receive, which waits."""
    op = kind_of(one.name.replace("SendRecv", "Receive")) or one.name
    return Collective(op, str(one.arguments.get("Process Group Name", "")), one.seconds)


def _kernel(one: Slice, operators: dict[str, Slice]) -> Kernel:
    told = one if one.category == OPERATORS else operators.get(str(one.arguments.get("External id")))
    if told is not None and (told.arguments.get(CALLS) or told.name in VIEWS):
        return Kernel(one.name, told.name, one.seconds, "operators that call others or make views: the host's own time")
    if told is None or "Input Dims" not in told.arguments:
        kind = one.name.rpartition("/")[2].partition("-op")[0][:200]
        of_kineto = one.category in (*KERNELS, OPERATORS)
        why = "no shapes; profile with record_shapes=True" if of_kineto else "no shapes in a trace of MindSpore"
        return Kernel(one.name, kind, one.seconds, f"{kind}: {why}")
    shapes = _shapes(told.arguments["Input Dims"])
    types = told.arguments.get("Input type")
    names = [str(name) for name in types] if isinstance(types, list) else []
    text = ";".join(",".join(map(str, shape)) for shape in shapes)[:400]
    return Kernel(one.name, told.name[:200], one.seconds, work_of(told.name, shapes, names), text)


def _shapes(given: Any) -> list[tuple[int, ...]]:
    """The shapes of operands; what is none is a number."""
    found = []
    for shape in given if isinstance(given, list) else ():
        sizes = tuple(size for size in shape if isinstance(size, int) and size >= 0) if _is_shape(shape) else ()
        found.append(sizes if math.prod(sizes) <= LARGEST else ())
    return found


def _is_shape(given: Any) -> bool:
    return isinstance(given, list) and len(given) <= MOST_DIMENSIONS


def work_of(name: str, shapes: Sequence[tuple[int, ...]], types: Sequence[str]) -> Operator | str:
    """Return what an operator of PyTorch computes, or why it cannot be told."""
    if name in PRODUCTS:
        first, second = (*shapes[PRODUCTS[name] :], (), ())[:2]
        dtype = TYPES.get(types[PRODUCTS[name]]) if len(types) > PRODUCTS[name] else None
        if (
            len(first) < 2
            or len(second) < 2
            or dtype is None
            or first[-1] != second[-2]
            or not math.prod((*first, *second))
        ):
            return f"{name}: shapes that are no product, or an unknown type"
        rows, inner, columns, batch = first[-2], first[-1], second[-1], math.prod(first[:-2])
        size = 4 if dtype == "float32" else 2
        traffic = float(size * batch * (rows * inner + inner * columns + rows * columns))
        return Operator(name, MATRIX, 2.0 * batch * rows * inner * columns, traffic, (rows, inner, columns), dtype)
    if _is_attention(name):
        return _attention(name, shapes, types)
    sizes = [
        math.prod(shape) * BYTES[kind] for shape, kind in zip(shapes, types, strict=False) if shape and kind in BYTES
    ]
    return Operator(name, VECTOR, bytes=float(sum(sizes) + max(sizes))) if sizes else f"{name}: no shapes of tensors"


def _attention(name: str, shapes: Sequence[tuple[int, ...]], types: Sequence[str]) -> Operator | str:
    """Queries and keys ``[batch, heads, seq, width]``, taken to be causal; behind a gradient they are the second and third."""
    backward = "backward" in name
    given = [shape for shape in shapes if len(shape) == DIMENSIONS][backward:]
    dtype = TYPES.get(types[0]) if types else None
    if len(given) < 2 or dtype is None:
        return f"{name}: in another layout"
    queries, keys = given[0], given[1]
    flops = 4.0 * math.prod(queries) * seen_keys(max(1, keys[-2])) * (FLASH_BACKWARD if backward else 1.0)
    traffic = 2.0 * (2 * math.prod(queries) + 2 * math.prod(keys)) * (1 + backward)
    return Operator(name, ATTENTION, flops, traffic, dtype=dtype)
