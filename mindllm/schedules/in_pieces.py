"""The order of operations of MindSpore's ``seqpipe``, ``seqvpp`` and ``seqsmartvpp``, with sequences in pieces.

A piece needs the keys and values of earlier pieces, so the pieces of a micro-batch go forward in order through each chunk, and
back in the opposite order. Each piece is one pass: pass ``m * pieces + p`` is piece ``p`` of micro-batch ``m``. The rules are
those of MindSpore 2.10, read from compiled ranks.
"""

from __future__ import annotations

from itertools import chain, pairwise

from mindllm.architecture.layer_counts import SEQPIPE, SEQSMARTVPP
from mindllm.schedules.operations import BACKWARD, FORWARD, Operation


def stage_order(
    schedule: str, stage: int, stages: int, chunks: int, micro_batches: int, pieces: int
) -> tuple[Operation, ...]:
    """Return the operations of one stage."""
    groups = _groups(schedule, stages, chunks, micro_batches, pieces)
    parts, back = range(pieces), range(pieces - 1, -1, -1)
    forwards = [
        (FORWARD, chunk, micro * pieces + piece)
        for group in groups
        for chunk in range(chunks)
        for micro in group
        for piece in parts
    ]
    backwards = [
        (BACKWARD, chunk, micro * pieces + piece)
        for group in groups
        for chunk in reversed(range(chunks))
        for micro in group
        for piece in back
    ]
    later_passes = (stages - 1 - stage) * (1 if chunks == 1 or schedule == SEQSMARTVPP else 2)
    warm_up = min(later_passes + (chunks - 1) * len(groups[0]) * pieces + pieces - 1, len(forwards) - 1)
    pairs = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *pairs, *backwards[len(forwards) - warm_up :])


def _groups(schedule: str, stages: int, chunks: int, micro_batches: int, pieces: int) -> list[range]:
    """Return the micro-batches that pass a chunk before the next chunk begins.

    A group has as many micro-batches as stages; except for ``seqpipe`` as many as fill the stages with their pieces. The
    remaining ones are distributed, one to each group.
    """
    size = stages if schedule == SEQPIPE or chunks == 1 else stages // pieces
    count = max(micro_batches // size, 1)
    each, rest = divmod(micro_batches, count)
    ends = [0]
    for group in range(count):
        ends.append(ends[-1] + each + (group < rest))
    return [range(start, end) for start, end in pairwise(ends)]
