"""How many layers each chunk and stage of a pipeline holds, from ``offset`` (MindFormers' ``LayerSetting``, made strict).

``counts[chunk][stage] = num_layers // (stages * chunks) + offset[chunk][stage]``. MindFormers takes the
sum of ``offset`` before broadcasting it, which accepts plans for more layers than the model has; here it is taken after.
"""

from __future__ import annotations

from collections.abc import Sequence

ZERO_BUBBLE_V = "zero_bubble_v"
"""MindSpore's schedule of two chunks per stage in a V, with weight gradients apart where a stage would wait (Qi et al., 2024,
2405.15362)."""
CHUNKS_OF_A_V = 2
ONE_F_ONE_B = "1f1b"
SEQPIPE, SEQVPP, SEQSMARTVPP = IN_PIECES = ("seqpipe", "seqvpp", "seqsmartvpp")
"""MindSpore's schedules in which a sequence may go through the pipeline in pieces."""
SEARCHED = (ONE_F_ONE_B, ZERO_BUBBLE_V, *IN_PIECES)
"""Schedules that a search for a strategy may try."""
Offset = int | tuple[int, ...] | tuple[tuple[int, ...], ...]
StageLayers = tuple[tuple[int, ...], ...]


def layer_counts(
    num_layers: int, pipeline_stage: int, pp_interleave_num: int, offset: int | Sequence[int] | Sequence[Sequence[int]]
) -> StageLayers:
    """Return layers per ``[chunk][stage]``; raise ``ValueError`` if ``offset`` does not place all layers."""
    average, remainder = divmod(num_layers, pipeline_stage * pp_interleave_num)
    rows = broadcast_offset(offset, pipeline_stage, pp_interleave_num)
    placed = sum(map(sum, rows))
    if placed != remainder:
        example = _example(remainder, pipeline_stage, pp_interleave_num)
        raise ValueError(
            f"sums to {placed} over {pp_interleave_num} chunk(s) x {pipeline_stage} stage(s), but {num_layers} layers "
            f"leave {remainder} to place beyond {average} each; write for example {example}"
        )
    counts = tuple(tuple(average + extra for extra in row) for row in rows)
    for chunk, row in enumerate(counts):
        for stage, count in enumerate(row):
            if count < 1:
                raise ValueError(f"gives stage {stage} of chunk {chunk} {count} layers; every one needs at least 1")
    return counts


def places_in_order(stages: int, chunks: int, v_shape: bool = False) -> tuple[tuple[int, int], ...]:
    """Return the places ``(chunk, stage)`` in the order of the model.

    Each chunk runs from the first stage to the last; in a V-shaped schedule every second one runs in reverse.
    """
    back = tuple(reversed(range(stages)))
    return tuple(
        (chunk, stage) for chunk in range(chunks) for stage in (back if v_shape and chunk % 2 else range(stages))
    )


def broadcast_offset(
    offset: int | Sequence[int] | Sequence[Sequence[int]], pipeline_stage: int, pp_interleave_num: int
) -> StageLayers:
    """Return ``offset`` as ``[chunk][stage]``: an integer applies everywhere, a list of stages to every chunk."""
    if isinstance(offset, int):
        return ((offset,) * pipeline_stage,) * pp_interleave_num
    rows = [row for row in offset if not isinstance(row, int)]
    if not rows:
        flat = tuple(entry for entry in offset if isinstance(entry, int))
        return (_row(flat, pipeline_stage),) * pp_interleave_num
    if len(rows) != pp_interleave_num or len(rows) != len(offset):
        raise ValueError(
            f"needs {pp_interleave_num} list(s), one for each chunk (pp_interleave_num), not {len(offset)}"
        )
    return tuple(_row(row, pipeline_stage) for row in rows)


def _row(row: Sequence[int], pipeline_stage: int) -> tuple[int, ...]:
    if len(row) != pipeline_stage:
        raise ValueError(f"needs {pipeline_stage} numbers, one for each stage (pipeline_stage), not {len(row)}")
    return tuple(row)


def _example(remaining: int, pipeline_stage: int, pp_interleave_num: int) -> list[list[int]] | list[int] | int:
    """Return an example with the remaining layers on the last places, which have the fewest activations in 1F1B."""
    places = pipeline_stage * pp_interleave_num
    if remaining == 0:
        return 0
    flat = [int(place >= places - remaining) for place in range(places)]
    rows = [flat[start : start + pipeline_stage] for start in range(0, places, pipeline_stage)]
    return rows if pp_interleave_num > 1 else rows[0]
