"""What stages ask of a zero-bubble step together: the bound of ``lone_stages.py`` with the times that the other stages choose.

A step below a limit needs a split of which every stage asks for less. Behind a run of layers no way to the last stage and back
is shorter than the shortest through runs that such a split may have, and before it nothing that is left when the last micro-batch
comes back. With these times some runs ask for more than the limit; without them the others' shortest ways grow, and so on until
nothing changes (arc consistency). A limit at which no split is left is a lower bound; the largest is found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindllm.deadline import check
from mindllm.planning.problem import Problem
from mindllm.planning.zero_bubble.lone_stages import Options

PRECISION = 1e-8  # of the limit, to which the bound is found


def joint_bound(problem: Problem, options: Sequence[Options], limit: float, deadline: float = math.inf) -> float:
    """A lower bound of the step of all plans made of ``options``, ``[stages]``; ``limit`` where none is below it.

    Raises:
        OutOfTime: at ``deadline``.
    """
    left = allowed(problem, options, limit, deadline)
    if not len(left[0].start):
        return limit
    low, high = 0.0, limit
    while high - low > PRECISION * limit:
        middle = (low + high) / 2
        found = allowed(problem, left, middle, deadline)
        if len(found[0].start):
            high, left = middle, found
        else:
            low = middle
    return low


def allowed(problem: Problem, options: Sequence[Options], limit: float, deadline: float = math.inf) -> list[Options]:
    """Of ``options`` those that a step below ``limit`` can have, with the least time that is left behind them (``final``).

    No stage has any where there is no such step.

    Raises:
        OutOfTime: at ``deadline``.
    """
    left = _completed(problem, [mine.take(mine.alone < limit) for mine in options])
    before = -1
    while before != (before := sum(len(mine.start) for mine in left)):
        check(deadline)
        left = [
            replace(mine, final=np.maximum(mine.final, final))
            for mine, final in zip(left, _left_behind(problem, left), strict=True)
        ]
        asked = [
            mine.asked(trip, problem.micro_batches) for mine, trip in zip(left, _beyond(problem, left), strict=True)
        ]
        left = _completed(problem, [mine.take(step < limit) for mine, step in zip(left, asked, strict=True)])
    return left


def ways_back(problem: Problem, options: Sequence[Options]) -> list[np.ndarray]:
    """The least way from each stage to the last one and back by the layer it starts with, ``[stages + 1][layers + 1]``.

    Behind the last stage, minus the tensors between two, which every stage adds to what is behind it.
    """
    crossing = 2 * problem.point_to_point
    found = [np.append(np.full(problem.layer_count, np.inf), -crossing)]
    for mine in reversed(options):
        least = np.full(problem.layer_count + 1, np.inf)
        np.minimum.at(least, mine.start, crossing + found[-1][mine.end] + mine.trip)
        found.append(least)
    return found[::-1]


def _beyond(problem: Problem, options: Sequence[Options]) -> list[np.ndarray]:
    """The least way from the next stage to the last one and back, tensors between them included, ``[stages][options]``."""
    behind = ways_back(problem, options)[1:]
    return [2 * problem.point_to_point + least[mine.end] for mine, least in zip(options, behind, strict=True)]


def _left_behind(problem: Problem, options: Sequence[Options]) -> list[np.ndarray]:
    """Backward passes of the stages before and the first stage's weight gradient at least, ``[stages][options]``."""
    found = [np.zeros(len(options[0].start))]
    least = np.full(problem.layer_count + 1, np.inf)
    np.minimum.at(least, options[0].end, options[0].backward)
    for mine in options[1:]:
        found.append(least[mine.start] + problem.point_to_point)
        least = np.full(problem.layer_count + 1, np.inf)
        np.minimum.at(least, mine.end, found[-1] + mine.backward - mine.weight)
    return found


def _completed(problem: Problem, options: Sequence[Options]) -> list[Options]:
    """Those that stand in some split of all layers."""
    reached = np.zeros((problem.stages + 1, problem.layer_count + 1), bool)
    reached[0, 0] = True
    for stage, mine in enumerate(options):
        reached[stage + 1, mine.end[reached[stage, mine.start]]] = True
    left = np.zeros_like(reached)
    left[-1, -1] = True
    for stage in reversed(range(problem.stages)):
        left[stage, options[stage].start[left[stage + 1, options[stage].end]]] = True
    return [mine.take(reached[stage, mine.start] & left[stage + 1, mine.end]) for stage, mine in enumerate(options)]
