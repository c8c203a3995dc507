"""AdamW with moments of 8 bits in the model of time and in the formula of memory.

Operators are those of ``optimizers/adamw_8bit.py`` on a rank's part of a weight: their bytes. How fast a device looks up values
in a table is in no description of one; a lookup takes as long as its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.optimizer_state import is_in_codes
from mindllm.timing.costs.tuned_update import Matrix, Seldom, matrix_part
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES, Operator, elementwise
from mindllm.timing.workload import UpdateRule, Workload

CODE_BYTES, BOTH = 1, 2
# Bytes that operators read and write, for each number of a weight.
DECODED = (5, 8, 8)  # a code as an index, its value, times the scale; of both moments
MOMENTS = (8, 8, 8, 12, 8, 8, 8, 12)  # the scaled gradient, what stays of a moment and what comes, their sums, a square
MOVED = (
    8,
    8,
    12,
    8,
    12,
    8,
    12,
    8,
)  # root, a little more, quotient; what decays, the step, differences; the weight is written
LARGEST = (4,)
PLACED = (8, 8, 8, 8, 8, 8, 8, 12, 8, 12, 8)  # over the scale; decade by a logarithm; the line's place
NEAREST = (8, 9, 5, 12, 8, 9, 5, 12)  # one more or less where that is nearer
WRITTEN = (5, 2)
SIGN = (8, 5, 5, 8, 8, 12, 8, 8)  # of the first moment
OF_BLOCK = (8, 8, 8, 8)  # for each block: a scale, a little more, its reciprocal in two operators; it is written
SCALES_READ = 3 * FP32_BYTES  # and what reads or writes it beside a block
ENCODED = (*LARGEST, *PLACED, *NEAREST, *WRITTEN)
WORKING = 25.0
"""Bytes for each number of a part that is updated: second moment, magnitudes, places, signs (by MindSpore's dry run)."""


def saved_bytes(numbers: float, rule: UpdateRule) -> float:
    """What moments in codes leave free of those in fp32, of so many numbers."""
    return BOTH * numbers * (FP32_BYTES - CODE_BYTES - FP32_BYTES / rule.block) if numbers else 0.0


def coded_update(numbers: float, weights: float, rule: UpdateRule) -> tuple[Seldom, ...]:
    """The update of so many ``numbers`` in so many ``weights`` on a rank, each with launches of its own."""
    if not numbers:
        return ()
    of_one = tuple(_operators(numbers / weights, rule))
    return (Seldom(weights, of_one),)


def _operators(numbers: float, rule: UpdateRule) -> Iterator[Operator]:
    yield elementwise("adamw_8bit.norm", (FP32_BYTES + HALF_BYTES) * numbers, 1.0)  # and the copy in half precision
    passes = (*DECODED, *DECODED, *MOMENTS, *MOVED, *ENCODED, *ENCODED, *SIGN)
    for size in passes:
        yield elementwise("adamw_8bit", size * numbers, 1.0)
    for size in (*OF_BLOCK, SCALES_READ) * BOTH:
        yield elementwise("adamw_8bit.scales", size * numbers / rule.block, 1.0)


def coded_working_bytes(workload: Workload) -> float:
    """What a stage needs beside its state while it updates one weight, of the table or layer where that is most.

    Weights are updated one after the other. Gradients that are not accumulated are gone once they are used.
    """
    strategy, rule, architecture = workload.strategy, workload.update, workload.architecture
    if not rule.block:
        return 0.0
    accumulates = strategy.micro_batches * strategy.accumulation > 1
    table = architecture.vocab_size * architecture.hidden_size / strategy.model_parallel
    sizes = [[table / strategy.shards(strategy.replica_num)]]
    sizes += [[one.size for one in _parts(spec, workload)] for spec in architecture.specifications()]
    most = 0.0
    for own in sizes:
        used = 0.0
        for size in own:
            used += 0.0 if accumulates else FP32_BYTES * size
            most = max(most, WORKING * size - used)
    return most


def _parts(spec: LayerSpec, workload: Workload) -> list[Matrix]:
    """Of weights of a layer whose moments are in codes."""
    return [
        matrix_part(name, shape, workload.strategy)
        for name, shape in spec.weights().items()
        if is_in_codes(shape, workload.update.block) and name not in spec.frozen
    ]
