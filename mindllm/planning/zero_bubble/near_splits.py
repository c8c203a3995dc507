"""Splits from which a search for zero-bubble plans starts: those that ask for little more than the bound, and still go well.

Splits by profile leave their stages room for numbers of micro-batches that are said beforehand. The others need none: of the runs
of layers that a step below a limit can have (``joint_bound.py``) two kinds of splits are made, that with the shortest way to the
last stage and back, and for several periods that whose micro-batches, one in each period, come back soonest where passes and
weight gradients of a stage do not overlap. With such a period T a backward pass starts on a stage V after the forward pass, the
latter at 0 in the period; so V mod T leaves room for the forward pass before it, for itself, and for the weight gradient behind
it or before it. From the forward pass to the weight gradient it takes no more periods than memory holds micro-batches. As waiting
is allowed, the least V of the stages behind is best, and a dynamic program from the last stage on finds the least of all splits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mindllm.deadline import check
from mindllm.planning.plan import Plan
from mindllm.planning.problem import Problem
from mindllm.planning.zero_bubble.joint_bound import allowed
from mindllm.planning.zero_bubble.lone_stages import LoneStages, Options

LIMITS = 6  # between the bound and the best step
PERIODS = (0.9, 0.92, 0.94, 0.96, 0.98, 1.0, 1.03)  # of the limit's share for a micro-batch
ABOVE = 1e-3  # the first limit above the bound
EXACT = 1e-7  # of a period, by which times may overlap
SLACK = (0.0, 0.03, 0.08, 0.2)  # beyond the bound: splits that keep to it and compute least are tried

Onward = Callable[[Options, np.ndarray], np.ndarray]
"""From the least values behind each run of layers, ``[options]``, to those with the run; infinite where it is not possible."""


def near_splits(stages: LoneStages, bound: float, best: float, deadline: float) -> Iterator[Plan]:
    """Plans between ``bound`` and the step of the ``best`` plan.

    Raises:
        OutOfTime: at ``deadline``.
    """
    problem = stages.problem
    for limit in np.linspace(min(bound * (1 + ABOVE), best), best, LIMITS):
        options = allowed(problem, stages.options, limit, deadline)
        periods = [share * limit / problem.micro_batches for share in PERIODS]
        for onward in (_shortest(problem), *(_periodic(problem, period) for period in periods)):
            check(deadline)
            chosen = _least(problem, options, onward)
            if chosen is not None:
                yield stages.plan_of(options, chosen)


def splits_by_profile(stages: LoneStages, bound: float) -> Iterator[Plan]:
    """Splits that ask for little more than the bound, with several profiles of micro-batches under way."""
    behind = stages.stages - np.arange(stages.stages)
    profiles = [np.ones_like(behind), behind, np.minimum(2 * behind - 1, stages.stages), 2 * behind - 1]
    plans = (stages.plan(bound * (1 + slack), profile) for slack, profile in itertools.product(SLACK, profiles))
    yield from dict.fromkeys(plan for plan in plans if plan is not None)


def _least(problem: Problem, options: Sequence[Options], onward: Onward) -> list[int] | None:
    """The run of layers of each stage with the least value of all; None where none is possible."""
    least = np.append(np.full(problem.layer_count, np.inf), -2 * problem.point_to_point)
    choices = []
    for mine in reversed(options):
        values = onward(mine, least[mine.end])
        falling = np.argsort(-values, kind="stable")
        least, choice = np.full(problem.layer_count + 1, np.inf), np.zeros(problem.layer_count + 1, int)
        least[mine.start[falling]], choice[mine.start[falling]] = values[falling], falling
        choices.append(choice)
    if not np.isfinite(least[0]):
        return None
    chosen, at = [], 0
    for mine, choice in zip(options, reversed(choices), strict=True):
        chosen.append(int(choice[at]))
        at = mine.end[chosen[-1]]
    return chosen


def _shortest(problem: Problem) -> Onward:
    """The way to the last stage and back."""
    return lambda mine, behind: 2 * problem.point_to_point + behind + mine.trip


def _periodic(problem: Problem, period: float) -> Onward:
    """The same with the waits that a period asks for."""
    spare = EXACT * period

    def onward(mine: Options, behind: np.ndarray) -> np.ndarray:
        forward, weight, backward = mine.forward, mine.weight, mine.backward - mine.weight
        ready = np.where(np.isfinite(behind), forward + behind + 2 * problem.point_to_point, 0.0)
        before = np.floor(ready / period + EXACT)  # whole periods

        def start(first: np.ndarray, last: np.ndarray) -> np.ndarray:
            """The first moment that falls between two of the period."""
            late = np.where(ready - before * period <= last + spare, before, before + 1) * period + first
            return np.where(first <= last + spare, np.maximum(ready, late), np.inf)

        behind_it = start(forward, period - backward - weight)
        behind_it[behind_it + backward + weight > mine.under_way * period + spare] = np.inf
        before_it = start(forward + weight, period - backward)
        before_it[~(np.floor(before_it / period + EXACT) + 2 <= mine.under_way)] = np.inf
        return np.where(np.isfinite(behind), np.minimum(behind_it, before_it) + backward, np.inf)

    return onward
