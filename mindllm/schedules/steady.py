"""1F1B with far more micro-batches than stages: some are simulated, and the steady state is repeated, which is exact.

A stage alternates forward and backward passes after its warm-up. The k-th pair of every stage depends on the k-th and
(k - 1)-th of its neighbors, by the same rule for every k. So once all stages end their k-th pair later than their (k - c)-th
by the same time, every further c micro-batches lengthen the step by that time (Baccelli et al. 1992, Synchronization and
Linearity, section 3.7: the periodic regime of a max-plus linear system).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mindllm.deadline import check
from mindllm.errors import UserError
from mindllm.schedules.orders import Orders, stage_orders, timetable
from mindllm.schedules.simulate import Timeline, simulate

SCHEDULE = "1f1b"  # the order that reaches a steady state
LONG = 2**18  # stages x micro-batches from which on not all are simulated
LARGEST = 2**22  # stages x micro-batches that are simulated
EQUAL = 1e-11  # of the end of a pass, by which two periods may differ
CYCLES = 16  # micro-batches after which the steady state may repeat


class NotSteady(UserError):
    """The most micro-batches that are simulated do not reach a steady state."""


def is_long(stages: int, micro_batches: int) -> bool:
    """Return True if only some micro-batches are simulated."""
    return stages * micro_batches > LONG and micro_batches > _few(stages)


def first_orders(stages: int, micro_batches: int) -> Orders:
    """Return the order of the first simulated micro-batches; a stage holds as many as with all."""
    few = _few(stages) if is_long(stages, micro_batches) else micro_batches
    return stage_orders("1f1b", stages, 1, few)


def _few(stages: int) -> int:
    return max(2 * stages, LONG // (2 * stages))


def simulate_long(
    micro_batches: int, forward: np.ndarray, backward: np.ndarray, delay: float, deadline: float = math.inf
) -> Timeline:
    """Return the step of 1F1B with one chunk; times per stage, ``[stages]``.

    Raises:
        NotSteady: no steady state within the most micro-batches that are simulated.
        OutOfTime: no steady state within the first of them, and ``deadline`` has passed.
    """
    stages = len(forward)
    few = first = _few(stages)
    while few < micro_batches and stages * few <= LARGEST:
        if few > first:
            check(deadline)
        line = simulate(timetable(stage_orders("1f1b", stages, 1, few), 1), forward, backward, delay=delay)
        steady = _steady(line, few)
        if steady is None:
            few *= 2
            continue
        cycle, period = steady
        rest = (micro_batches - few) % cycle
        if not rest:
            return replace(line, repeated=micro_batches - few, period=period / cycle)
        few += rest
    if stages * micro_batches > LARGEST:
        raise NotSteady(
            f"{stages} stages x {micro_batches} micro-batches: not steady after {LARGEST // stages} micro-batches, which are the "
            "most that are simulated; give fewer"
        )
    check(deadline)
    return simulate(timetable(stage_orders("1f1b", stages, 1, micro_batches), 1), forward, backward, delay=delay)


def _steady(line: Timeline, micro_batches: int) -> tuple[int, float] | None:
    """After how many micro-batches all stages do the same again, and the time between; None when they do not yet."""
    stages = line.table.stages
    pairs = micro_batches - (stages - 1)  # of the first stage, which has the fewest
    if pairs <= 2 * CYCLES:
        return None
    by_stage = line.end[np.argsort(line.table.place, kind="stable")].reshape(stages, -1)
    first = np.arange(stages)[::-1] + 2 * (pairs - 2 * CYCLES)  # operations of the warm-up, then pairs
    ends = by_stage[np.arange(stages), first + np.arange(4 * CYCLES)[:, None]].reshape(2 * CYCLES, 2, stages)
    for cycle in range(1, CYCLES + 1):
        grown = ends[cycle:] - ends[:-cycle]
        if np.ptp(grown) <= EQUAL * line.makespan:
            return cycle, float(grown.mean())
    return None
