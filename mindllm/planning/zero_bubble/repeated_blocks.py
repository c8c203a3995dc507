"""Orders of a V that repeat one block of passes (Qi et al., 2024, 2405.15362, sections 3 and 4).

A block is the six passes of a micro-batch on every stage, each in slots of a grid. The next micro-batch has the same slots a
period later, and a period is as long as the passes of a micro-batch: stages never wait while blocks repeat. A block is stable
where no two of its passes fall into one slot of a period. On the way down forward passes and gradients of inputs have one stride
on the first stages and another behind; on the way back they follow at once. Gradients of weights take the next free slots.

All stable blocks within the memory are repeated, and timed together with the costs as they are. Only the order is kept of the
grid, so slots in which a stage would wait vanish ("squeezing"). What waits are left in the best is filled (``filled_waits.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mindllm.deadline import check
from mindllm.planning.zero_bubble.folded_costs import B0, B1, F0, F1, W0, W1, FoldedCosts
from mindllm.planning.zero_bubble.operation_order import Kinds

STRIDES = 5  # times a forward pass, from a stage to the next on the way down
LONGEST = 12  # slots of a period
AT_ONCE = 512  # blocks that are timed together
LOOK = 32  # slots between two looks at the clock


@dataclass(frozen=True)
class Grid:
    """Slots that a forward pass, gradients of inputs and gradients of weights take."""

    forward: int
    backward: int
    weight: int

    @property
    def period(self) -> int:
        """Slots from a micro-batch to the next."""
        return 2 * (self.forward + self.backward + self.weight)

    def costs(self, costs: FoldedCosts) -> FoldedCosts:
        """Costs whose times are these slots, without delay."""
        forward, backward, weight = (np.full_like(costs.forward, slots) for slots in self.slots[::2])
        return replace(costs, forward=forward, backward=backward, weight=weight, delay=0.0)

    @property
    def slots(self) -> list[int]:
        """By kind of operation."""
        return [self.forward, self.forward, self.backward, self.backward, self.weight, self.weight]


def grids(costs: FoldedCosts) -> list[Grid]:
    """Passes alike, and in round multiples of the shortest, where a period has no more than ``LONGEST`` slots."""
    means = [float(times.mean()) for times in (costs.forward, costs.backward, costs.weight)]
    unit = min((mean for mean in means if mean > 0), default=1.0)
    alike, multiples = Grid(1, 1, 1), Grid(*(max(1, round(mean / unit)) for mean in means))
    return [alike] if multiples == alike or multiples.period > LONGEST else [alike, multiples]


def stable_blocks(costs: FoldedCosts, micro_batches: int, grid: Grid, deadline: float = math.inf) -> np.ndarray:
    """First slots of the passes of all stable blocks that memory has room for, ``[blocks, 6, stages]``.

    Raises:
        OutOfTime: ``deadline`` passed.
    """
    found = [np.empty((0, 6, costs.stages), dtype=np.int64)]
    for strides in _strides(costs.stages, grid):
        check(deadline)
        found.append(_within(costs, micro_batches, grid, _starts(strides, grid)))
    return np.concatenate(found)


def _strides(stages: int, grid: Grid) -> Iterator[np.ndarray]:
    """From each stage to the next on the way down, ``[stages - 1]``."""
    place = np.arange(stages - 1)
    options = range(grid.forward, STRIDES * max(grid.forward, grid.backward) + 1)
    for stride in options:
        yield np.full(stages - 1, stride)
    for second, first in itertools.combinations(options, 2):
        for cut in range(1, stages - 1):
            yield np.where(place < cut, first, second)


def _starts(strides: np.ndarray, grid: Grid) -> np.ndarray:
    """Blocks of one way down with all pauses at the turns, whose passes to inputs clash nowhere, ``[blocks, 4, stages]``."""
    stages = len(strides) + 1
    pauses = np.array(list(itertools.product(range(grid.period), repeat=3)))
    back = np.arange(stages)[::-1]
    down = np.append(0, strides.cumsum())
    again = np.append(0, np.maximum(strides, grid.backward).cumsum())
    turn = down[-1] + grid.forward + pauses[:, 0]
    loss = turn + (back[0] + 1) * grid.forward + pauses[:, 1]
    last = loss + again[-1] + grid.backward + pauses[:, 2]
    starts = np.empty((len(pauses), 4, stages), dtype=np.int64)
    starts[:, F0], starts[:, F1] = down, turn[:, None] + back * grid.forward
    starts[:, B1], starts[:, B0] = loss[:, None] + again, last[:, None] + back * grid.backward
    return np.asarray(starts[(_taken(starts, grid) >= 0).all(axis=1)])


def _mask(start: np.ndarray, slots: int, period: int) -> np.ndarray:
    """Slots of a period as bits."""
    bits = np.left_shift(1, np.arange(period))
    masks = np.sum([np.roll(bits, -shift) for shift in range(slots)], axis=0)
    return np.asarray(masks[start % period])


def _taken(starts: np.ndarray, grid: Grid) -> np.ndarray:
    """Slots that passes take, as bits, ``[blocks, stages]``; -1 where two take one."""
    taken = np.zeros(starts.shape[::2], dtype=np.int64)
    clash = np.zeros(taken.shape, dtype=bool)
    for kind in range(4):
        mask = _mask(starts[:, kind], grid.slots[kind], grid.period)
        clash |= (taken & mask) != 0
        taken |= mask
    return np.where(clash, -1, taken)


def _within(costs: FoldedCosts, micro: int, grid: Grid, starts: np.ndarray) -> np.ndarray:
    """Blocks with gradients of weights in the first slots that are free, those that memory has room for."""
    period, taken = grid.period, _taken(starts, grid)
    block = np.concatenate([starts, np.full_like(starts[:, :2], -1)], axis=1)
    for kind, after in ((W1, B1), (W0, B0)):
        for wait in range(period):
            start = starts[:, after] + grid.backward + wait
            mask = _mask(start, grid.weight, period)
            free = (block[:, kind] < 0) & ((taken & mask) == 0)
            block[:, kind] = np.where(free, start, block[:, kind])
            taken = np.where(free, taken | mask, taken)
    block = block[(block[:, 4:] >= 0).all(axis=(1, 2))]
    most = np.zeros((len(block), costs.stages))
    for slot in range(period):
        kept = np.zeros_like(most)
        for chunk in (0, 1):
            count = (slot - block[:, F0 + chunk]) // period - (slot - block[:, W0 + chunk] - grid.weight) // period
            kept += np.minimum(count, micro) * costs.held[chunk]
        most = np.maximum(most, kept)
    return block[(most <= costs.limit * (1 + 1e-12)).all(axis=1)]


def repeated(block: np.ndarray, micro_batches: int, period: int) -> list[Kinds]:
    """The kinds of operations of every stage in the order of a block, ``[6, stages]``, that repeats."""
    slots = block[:, :, None] + period * np.arange(micro_batches)  # kind, stage, micro-batch
    kinds = np.repeat(np.arange(6), micro_batches)
    return [kinds[np.argsort(slots[:, stage].ravel(), kind="stable")].tolist() for stage in range(block.shape[1])]


def ranked(costs: FoldedCosts, micro_batches: int, grid: Grid, deadline: float = math.inf) -> Iterator[list[Kinds]]:
    """Orders of the blocks of a grid that memory has room for, those first whose step is shortest.

    Raises:
        OutOfTime: ``deadline`` passed.
    """
    blocks = stable_blocks(costs, micro_batches, grid, deadline)
    parts = [blocks[at : at + AT_ONCE] for at in range(0, len(blocks), AT_ONCE)]
    times = [_timed(costs, part, micro_batches, grid.period, deadline) for part in parts]
    for number in np.argsort(np.concatenate([np.empty(0), *times]), kind="stable"):
        yield repeated(blocks[number], micro_batches, grid.period)


def _timed(costs: FoldedCosts, blocks: np.ndarray, micro: int, period: int, deadline: float) -> np.ndarray:
    """The step of each block repeated, with the times of ``costs``, ``[blocks]``."""
    count, stages = len(blocks), costs.stages
    numbers, places = np.arange(count)[:, None], np.arange(stages)[None]
    kind_of = np.full((count, stages, period), -1)
    for number in range(6):
        kind_of[numbers, places, blocks[:, number] % period] = number
    source, what, delay = _needs(costs)
    duration = np.asarray(costs.durations)
    ends = np.zeros((count, stages, 7, micro))  # kind 6: nothing
    free = np.zeros((count, stages))
    for slot in range(int(blocks.max()) + period * micro):
        if slot % LOOK == 0:
            check(deadline)
        kinds = kind_of[:, :, slot % period]
        micros = (slot - blocks[numbers, kinds, places]) // period
        row, stage = np.nonzero((kinds >= 0) & (micros >= 0) & (micros < micro))
        kind, micro_batch = kinds[row, stage], micros[row, stage]
        ready = ends[row, source[stage, kind], what[stage, kind], micro_batch] + delay[stage, kind]
        end = np.maximum(ready, free[row, stage]) + duration[kind, stage]
        ends[row, stage, kind, micro_batch] = end
        free[row, stage] = end
    return free.max(axis=1)


def _needs(costs: FoldedCosts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stage, kind and delay of what each kind needs on each stage, ``[stages, 6]``; kind 6 where it needs nothing."""
    source, what = (np.zeros((costs.stages, 6), dtype=np.int64) for _ in range(2))
    delays = np.zeros((costs.stages, 6))
    for stage in range(costs.stages):
        for kind, need in enumerate(costs.needed(stage)):
            source[stage, kind], what[stage, kind] = (stage, 6) if need is None else need
            delays[stage, kind] = costs.delay if source[stage, kind] != stage else 0.0
    return source, what, delays
