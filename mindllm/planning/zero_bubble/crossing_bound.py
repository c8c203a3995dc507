"""A bound of all plans by stages whose few micro-batches cross each other (``crossings.py``).

Only runs of layers count that a plan quicker than a limit can have (``joint_bound.py``). A run that may hold a number of
micro-batches asks for what these ask for where they cross each other, with the least times of all such runs and of all that may
be behind. What asks for more than the limit is left out, which makes the least times of the others longer; the joint bound of
what is left, each run with what it asks for, is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mindllm.planning.zero_bubble.crossings import Trip, crossing_time
from mindllm.planning.zero_bubble.joint_bound import allowed, joint_bound, ways_back
from mindllm.planning.zero_bubble.lone_stages import LoneStages, Options

MOST = 5  # micro-batches under way, of which all ways to cross are tried
NEAR = 0.75  # of the limit: a stage whose micro-batches in turn take less is not looked at
WIDTHS = (32, 64, 128, 256, 512)  # of the front, one after another


class CrossingBound:
    """What stages that hold no more than :data:`MOST` micro-batches ask for, of all plans below ``limit``."""

    def __init__(self, stages: LoneStages, limit: float) -> None:
        self.problem, self.limit = stages.problem, limit
        self._keep(stages.options)

    def _keep(self, options: Sequence[Options], deadline: float = math.inf) -> None:
        """Goes on with these, as far as a step below the limit can have them."""
        self.options = allowed(self.problem, options, self.limit, deadline)
        self.back = ways_back(self.problem, self.options)[:-1]

    @property
    def promising(self) -> list[tuple[int, int]]:
        """Stages and numbers of micro-batches that may ask for more than is known, those that ask for most first."""
        found = []
        for stage, mine in enumerate(self.options):
            in_turn = self._in_turn(stage)
            for number in range(2, MOST + 1):
                least = float(in_turn[mine.under_way == number].min(initial=np.inf))
                if NEAR * self.limit < least < np.inf:
                    found.append((least, stage, number))
        return [(stage, number) for _, stage, number in sorted(found, reverse=True)]

    @property
    def _crossing(self) -> float:
        """Of a tensor to the next stage and of one back."""
        return 2 * self.problem.point_to_point

    def _in_turn(self, stage: int) -> np.ndarray:
        """A step whose micro-batches follow each other in their places with the least way back, ``[options]``."""
        mine = self.options[stage]
        return mine.first + mine.turns * (self.back[stage][mine.start] + mine.weight)

    def trip(self, stage: int, chosen: Options) -> Trip:
        """With the least of each time over all splits, of the stage itself over what is ``chosen``."""
        least, turned = np.full(self.problem.layer_count + 1, np.inf), []
        least[chosen.start] = 0.0
        for each in (chosen, *self.options[stage + 1 :]):
            values, least = least[each.start] + each.trip, np.full(len(least), np.inf)
            np.minimum.at(least, each.end, values)
            turned.append(float(least.min()))
            least += self._crossing
        forward, backward, weight = (
            float(time.min()) for time in (chosen.forward, chosen.backward - chosen.weight, chosen.weight)
        )
        beyond = [float(least.min()) for least in self.back[stage + 1 :]]
        return Trip(forward, backward, weight, np.array(turned), np.array([*beyond, 0.0]))

    def asked(self, stage: int, number: int, width: int, deadline: float) -> float:
        """The step that a stage with room for that many micro-batches asks for at least.

        Raises:
            OutOfTime: at ``deadline``.
        """
        chosen = self.options[stage].take(self.options[stage].under_way == number)
        trip = self.trip(stage, chosen)
        late = max(0.0, float(chosen.final.min()) - trip.weight)
        found = crossing_time(
            trip, min(number, self.problem.micro_batches), self.problem.micro_batches, width, deadline
        )
        return float(chosen.first.min()) + found + late

    def rising(self, deadline: float) -> Iterator[float]:
        """Lower bounds of the step of all plans, with wider and wider fronts.

        Raises:
            OutOfTime: at ``deadline``.
        """
        for width in WIDTHS:
            for stage, number in self.promising:
                mine = self.options[stage]
                same = mine.under_way == number
                if not same.any():
                    continue  # left out meanwhile
                asked = self.asked(stage, number, width, deadline)
                if asked <= mine.alone[same].min():
                    continue
                alone = np.where(same, np.maximum(mine.alone, asked), mine.alone)
                kept = replace(mine, alone=alone).take(alone < self.limit)
                self._keep([*self.options[:stage], kept, *self.options[stage + 1 :]], deadline)
                yield joint_bound(self.problem, self.options, self.limit, deadline)
