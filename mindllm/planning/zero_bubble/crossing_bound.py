"""A bound of all plans by a stage whose few micro-batches cross each other (``crossings.py``), with the least times of all.

Only runs of layers count that a plan quicker than a limit can have: that alone allow it, and that the other stages can complete.
Where memory is so short that they are nearly the same in all plans, their least times are nearly those of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mindllm.planning.problem import Problem
from mindllm.planning.zero_bubble.crossings import Trip, crossing_time
from mindllm.planning.zero_bubble.lone_stages import LoneStages, Options

MOST = 5  # micro-batches under way, of which all ways to cross are tried
NEAR = 0.75  # of the limit: a stage whose micro-batches in turn take less is not looked at
WIDTHS = (32, 64, 128, 256, 512)  # of the front, one after another


class CrossingBound:
    """The stage of which most is asked when it holds no more than :data:`MOST` micro-batches, of all plans below ``limit``."""

    def __init__(self, stages: LoneStages, limit: float) -> None:
        self.problem, self.limit = stages.problem, limit
        self.options = completed(stages.problem, [mine.take(mine.alone < limit) for mine in stages.options])
        asked = [self._in_turn(stage, back) for stage, back in enumerate(self._back())]
        kept = [mine.take(time < limit) for mine, time in zip(self.options, asked, strict=True)]
        self.options = completed(stages.problem, kept)
        back = self._back()
        self.behind = np.array([*(float(least.min()) for least in back), 0.0])
        self.stage, self.promising = 0, False
        for stage, mine in enumerate(self.options):
            if len(mine.start) and 2 <= mine.under_way.max() <= MOST and not self.promising:
                self.stage, self.promising = stage, bool(self._in_turn(stage, back[stage]).min() > NEAR * limit)

    def _back(self) -> list[np.ndarray]:
        """The least way from each stage to the last one and back by the layer it starts with, ``[stages][layers + 1]``."""
        layers, found = self.problem.layer_count, []
        least = np.append(np.full(layers, np.inf), -self._crossing)
        for mine in reversed(self.options):
            values = mine.trip + self._crossing + least[mine.end]
            least = np.full(layers + 1, np.inf)
            np.minimum.at(least, mine.start, values)
            found.append(least)
        return found[::-1]

    @property
    def _crossing(self) -> float:
        """Of a tensor to the next stage and of one back."""
        return 2 * self.problem.point_to_point

    def _in_turn(self, stage: int, back: np.ndarray) -> np.ndarray:
        """A step whose micro-batches follow each other in their places with the least way ``back``, ``[options]``."""
        mine = self.options[stage]
        return mine.first + mine.turns * (back[mine.start] + mine.weight)

    def trip(self, stage: int) -> Trip:
        """With the least of each time over all splits."""
        mine = self.options[stage]
        least, turned = np.full(self.problem.layer_count + 1, np.inf), []
        least[mine.start] = 0.0
        for each in self.options[stage:]:
            values, least = least[each.start] + each.trip, np.full(len(least), np.inf)
            np.minimum.at(least, each.end, values)
            turned.append(float(least.min()))
            least += self._crossing
        turned[-1] = self.behind[stage]
        forward, backward, weight = (
            float(time.min()) for time in (mine.forward, mine.backward - mine.weight, mine.weight)
        )
        return Trip(forward, backward, weight, np.array(turned), self.behind[stage + 1 :])

    def rising(self, deadline: float) -> Iterator[float]:
        """Lower bounds of the step of all plans, with wider and wider fronts.

        Raises:
            OutOfTime: at ``deadline``.
        """
        if not self.promising:
            return
        mine, trip = self.options[self.stage], self.trip(self.stage)
        late = max(0.0, float(mine.final.min()) - trip.weight)
        under_way, micro_batches = int(mine.under_way.max()), self.problem.micro_batches
        for width in WIDTHS:
            found = crossing_time(trip, under_way, micro_batches, width, deadline)
            yield min(self.limit, float(mine.first.min()) + found + late)


def completed(problem: Problem, options: list[Options]) -> list[Options]:
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
