"""Rules by which the operations of a zero-bubble schedule are chosen: when a forward pass is due, what may wait for a gradient.

Where memory holds fewer micro-batches than there are stages behind, a pass that waits for one in the other direction makes its
micro-batch hold its place for longer, and so all others. Passes of all micro-batches meet without waiting where the first stage
starts them on a beat that is as long as a forward and a backward pass: every stage then has room for one of each in a beat, moved
by one stage they still fall into each other's gaps, and weight gradients take the places that are left free. At which beats
micro-batches start is spread evenly over the time that a micro-batch takes the slowest stage, or that memory asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mindllm.planning.zero_bubble.operation_order import StageCosts

DEPTHS = (0.0, 0.5, 0.8, 1.0, 1.03, 1.06, 1.25, 1.5)
"""Forward passes under way beyond 1F1B's, as a share of the stages behind."""
PATIENCE = (0.0, 0.15, 0.3, 0.7, 1.0)
"""The part of a weight gradient that may make the next operation late."""
BEATS = (1.0, 1.05)
"""Times the longest forward and backward pass that meet."""
PACES = (1.0, 1.04, 1.07, 1.1, 1.15)
"""Times the least time between two micro-batches."""
ON_BEATS = PATIENCE[:3]  # where weight gradients fill what beats leave free
CHANGES = (0.95, 0.98, 0.99, 1.01, 1.02, 1.05)


@dataclass(frozen=True)
class Rule:
    """What a stage does first.

    Attributes:
        wanted: forward passes under way that are enough, ``[stages]``.
        patience: the share of a weight gradient that may make others late, ``[stages]``.
        beat: between forward passes of the first stage, times the longest two passes that meet; 0: as soon as possible.
        pace: between micro-batches on the average, times the least; only with a beat.
    """

    wanted: np.ndarray
    patience: np.ndarray
    beat: float = 0.0
    pace: float = 1.0

    def starts(self, costs: StageCosts, micro_batches: int) -> np.ndarray:
        """The moments before which the first stage starts no forward pass, ``[micro_batches]``."""
        number = np.arange(micro_batches)
        beat = self.beat * longest_pair(costs)
        if not beat:
            return np.zeros(micro_batches)
        return beat * np.floor(number * max(1.0, self.pace * least_pace(costs, micro_batches) / beat) + 1e-9)

    def changed(self, random: np.random.Generator) -> Rule:
        """The rule with a stretch of stages changed, or its beat or pace."""
        if self.beat and random.random() < 0.5:
            name = random.choice(("beat", "pace"))
            return replace(self, **{name: getattr(self, name) * random.choice(CHANGES)})
        first = int(random.integers(len(self.wanted)))
        stretch = slice(first, first + int(random.integers(1, len(self.wanted) + 1)))
        wanted, patience = self.wanted.copy(), self.patience.copy()
        if random.random() < 0.5:
            wanted[stretch] = np.maximum(1, wanted[stretch] + random.choice((-1, 1)))
        else:
            patience[stretch] = random.choice(PATIENCE)
        return replace(self, wanted=wanted, patience=patience)


def grid(costs: StageCosts, micro_batches: int) -> Iterator[Rule]:
    """The same for all stages, by depth and patience; where memory holds less than 1F1B asks for by beat and pace, too."""
    stages = len(costs.forward)
    behind = stages - 1 - np.arange(stages)
    for depth, patience in itertools.product(DEPTHS, PATIENCE):
        yield Rule(behind + 1 + np.rint(depth * behind).astype(int), np.full(stages, patience))
    if (costs.room < np.minimum(behind + 1, micro_batches)).any():
        for beat, pace, patience in itertools.product(BEATS, PACES, ON_BEATS):
            yield Rule(np.full(stages, micro_batches), np.full(stages, patience), beat, pace)


def longest_pair(costs: StageCosts) -> float:
    """A forward and a backward pass of one stage, or of a stage and the next with the tensors between them."""
    apart = costs.forward[:-1] + costs.backward[1:] + 2 * costs.delay
    return float(max((costs.forward + costs.backward).max(), apart.max(initial=0.0)))


def least_pace(costs: StageCosts, micro_batches: int) -> float:
    """The time between micro-batches, by the work of the slowest stage and by what memory holds on the way behind each stage."""
    passes = costs.forward + costs.backward
    trip = np.cumsum((passes + 2 * costs.delay)[::-1])[::-1] - 2 * costs.delay
    held = (trip + costs.weight) / np.clip(costs.room, 1, micro_batches)
    return float(max((passes + costs.weight).max(), held.max()))
