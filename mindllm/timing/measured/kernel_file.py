"""Files of MindSpore's profiler, whose times are microseconds: kernels (``kernel_details.csv``) and steps
(``step_trace_time.csv``).

Shapes are in it from the profiler's level 1 on. Kernels that are alike are one, with the median of their times. Of a product
the inner size follows from operands and result, so how operands are transposed need not be known; attention is taken to be
causal.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindllm.errors import UserError, shortened
from mindllm.outside import read_rows
from mindllm.timing.costs.attention import seen_keys
from mindllm.timing.costs.layer import FLASH_BACKWARD
from mindllm.timing.costs.work import ATTENTION, MATRIX, VECTOR, Operator
from mindllm.timing.measured.kernels import Kernel

FILE = "kernel_details.csv"
TYPE, CORE, DURATION = "Type", "Accelerator Core", "Duration(us)"
SHAPES, DTYPES, FORMATS = "Input Shapes", "Input Data Types", "Input Formats"
RESULTS, RESULT_DTYPES = "Output Shapes", "Output Data Types"
COLUMNS = (TYPE, CORE, DURATION)
DESCRIBED = (SHAPES, DTYPES, RESULTS, RESULT_DTYPES)
MICROSECOND = 1e-6
LARGEST_TENSOR = 2**40  # elements; more than the memory of any device
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}
SHORT = {"bf16": "bfloat16", "float": "float32"}
ATTENTIONS = {"FlashAttentionScore": 1.0, "FlashAttentionScoreGrad": FLASH_BACKWARD}
VECTOR_CORES = ("AI_VECTOR_CORE", "AIV", "MIX_AIV")
Shape = tuple[int, ...]
Row = Mapping[str, str]
STEP_FILE = "step_trace_time.csv"
PARTS = ("Computing", "Communication(Not Overlapped)", "Free")


def read_kernels(path: Path) -> tuple[list[Kernel], Counter[str]]:
    """The kernels of a profile (a directory or the file), and how often others ran, by why they are left out.

    Raises:
        UserError: there is no such file, or it has no shapes, or it is of another version of the profiler.
    """
    file = path / FILE if path.is_dir() else path
    times: dict[Operator, list[float]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for line, row in _rows(file):
        try:
            seconds = MICROSECOND * float(row[DURATION])
        except ValueError:
            seconds = math.inf
        if not math.isfinite(seconds):
            raise UserError(f"{file}:{line}: {DURATION} must be a number (value {shortened(row[DURATION])})")
        found = operator_of(row)
        if isinstance(found, Operator) and seconds > 0:
            times[found].append(seconds)
        else:
            left_out[found if isinstance(found, str) else "no time"] += 1
    if not times:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common(3))
        raise UserError(f"{file}: none of its kernels can be used: {reasons or 'it has none'}")
    return [Kernel(one, statistics.median(spent), len(spent)) for one, spent in times.items()], left_out


def _rows(file: Path) -> Iterator[tuple[int, Row]]:
    try:
        rows = read_rows(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    for name in COLUMNS if rows else ():
        if name not in rows[0]:
            raise UserError(f"{file}: has no column {name}: it is not a {FILE}, or of another version of the profiler")
    for name in DESCRIBED if rows else ():
        if name not in rows[0]:
            raise UserError(f"{file}: has no column {name}; profile with profiler_level: 1, which has shapes")
    yield from enumerate(rows, 2)


def operator_of(row: Row) -> Operator | str:
    """Return what a row of ``kernel_details.csv`` ran, or why it cannot be told."""
    kind = row[TYPE]
    if any(name not in row for name in DESCRIBED):
        return f"{kind}: no shapes; profile with profiler_level: 1"
    shapes, results = _shapes(row[SHAPES]), _shapes(row[RESULTS])
    dtypes, result_dtypes = _dtypes(row[DTYPES]), _dtypes(row[RESULT_DTYPES])
    if any("FRACTAL" in part or "NZ" in part for part in row.get(FORMATS, "").split(";")):
        return f"{kind}: in a format of its own"
    sizes = [
        _size(shape, dtype)
        for shape, dtype in (*zip(shapes, dtypes, strict=False), *zip(results, result_dtypes, strict=False))
    ]
    if not shapes or not results or any(size is None for size in sizes) or len(shapes) > len(dtypes):
        return f"{kind}: no shapes or unknown types"
    traffic = float(sum(size or 0 for size in sizes))
    if "MatMul" in kind:
        return _product(kind, shapes, results[0], dtypes[0], traffic)
    if kind in ATTENTIONS:
        return _attention(kind, shapes, dtypes[0], traffic)
    if row[CORE] in VECTOR_CORES:
        return Operator(kind, VECTOR, bytes=traffic)
    return f"{kind} on {row[CORE]}"


def _product(kind: str, shapes: list[Shape], result: Shape, dtype: str, traffic: float) -> Operator | str:
    """``[..., m, k] x [..., k, n]``, whichever operand is transposed."""
    if len(shapes) < 2 or len(result) < 2 or len(shapes[0]) < 2:
        return f"{kind}: not of matrices"
    rows, columns = result[-2:]
    batch = math.prod(result[:-2])
    inner, rest = divmod(math.prod(shapes[0]), max(1, batch * rows))
    if rest or inner < 1 or inner not in shapes[1][-2:]:
        return f"{kind}: shapes that are no product"
    return Operator(kind, MATRIX, 2.0 * batch * rows * inner * columns, traffic, (rows, inner, columns), dtype)


def _attention(kind: str, shapes: list[Shape], dtype: str, traffic: float) -> Operator | str:
    """Query and key in the layouts ``[batch, heads, seq, width]`` or ``[batch, seq, heads · width]``."""
    query, key = shapes[0], shapes[1] if len(shapes) > 1 else ()
    if len(query) != len(key) or len(query) not in (3, 4):
        return f"{kind}: in another layout"
    flops = 4.0 * math.prod(query) * seen_keys(key[-2]) * ATTENTIONS[kind]
    return Operator(kind, ATTENTION, flops, traffic, dtype=dtype, head=query[-1] if len(query) == 4 else 0)


def _shapes(text: str) -> list[Shape]:
    """``"4096,128;128,64"``; empty where there are none."""
    parts = text.strip().strip('"').split(";")
    try:
        shapes = [tuple(int(size) for size in part.split(",") if size) for part in parts if part.strip()]
    except ValueError:
        return []
    return shapes if all(min(shape, default=0) >= 0 and math.prod(shape) <= LARGEST_TENSOR for shape in shapes) else []


def _dtypes(text: str) -> list[str]:
    names = [name.strip().removeprefix("DT_").lower() for name in text.strip().strip('"').split(";")]
    return [SHORT.get(name, name) for name in names if name]


def _size(shape: Shape, dtype: str) -> int | None:
    """Bytes; None of a type that is not known."""
    return math.prod(shape) * BYTES[dtype] if dtype in BYTES else None


def profiled_step(path: Path) -> float:
    """The mean of all steps but the first, which also warms up.

    Raises:
        UserError: there is no such file, or it is of another version of the profiler.
    """
    file = path / STEP_FILE if path.is_dir() else path
    try:
        rows = read_rows(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    missing = [part for part in PARTS if not rows or part not in rows[0]]
    if missing:
        raise UserError(
            f"{file}: has no column {missing[0]}: it is not a {STEP_FILE}, or of another version of the profiler"
        )
    try:
        steps = [MICROSECOND * sum(float(row[part]) for part in PARTS) for row in rows]
    except ValueError:
        steps = [math.inf]
    if not all(map(math.isfinite, steps)):
        raise UserError(f"{file}: a time of a step is not a number")
    kept = steps[1:] or steps
    return sum(kept) / len(kept)
