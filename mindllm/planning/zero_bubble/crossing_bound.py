"""A bound of all plans by stages whose few micro-batches cross each other.

Only runs of layers count that a plan quicker than a limit can have (``joint_bound.py``). A run that may hold a number of
micro-batches asks for what these ask for where they cross each other, with the least times of all such runs and of all that may
be behind. What asks for more than the limit is left out, which makes the least times of the others longer; the joint bound of
what is left, each run with what it asks for, is the bound.

How long micro-batches wait for each other where they cross is a lower bound of a stage that holds few of them.

Of micro-batches i < j under way behind a stage, j goes forward while i comes back, and no stage does both at once. So there is a
last stage x that does F(j) before B(i); all stages behind it do B(i) first. Let R(x) be the way from the stage to x and back,
V(x) that from x to the last stage and back, L the whole way, q(i) the end of the backward pass on the stage, and e(j, x) the
moment from which j might have gone straight on to reach x when it does, e(j) that for the last stage. Then

    q(i) >= e(j, x) + R(x)              j goes on to x, only then does i turn back from x
    e(j, y) >= e(i) + V(x + 1), y > x   i goes to the last stage and back to x + 1, only then does j go on
    q(j) >= e(j) + L

or, where the stage itself does B(i) first, j starts behind q(i). With passes of a kind on the stage one after another, and room
for c micro-batches, so that i + c starts no earlier than q(i) + w, this is all that is asked here: weight gradients of other
stages and their memory are left out.

The least end of the last micro-batch over all x is found by a walk over the micro-batches, with the Pareto front of the moments
that later ones ask for. Two x are enough for each pair: the last for which i is not made later than it is, as a nearer one only
holds j up for longer, and the next one, which does not hold j up any more (R(x) + V(x + 1) <= L): a farther one only makes i
later. Times are rounded down to a grid, so that equal states meet, and where the front is too wide neighbours are merged into one
with the least of each moment. All moments are sums and maxima of the times: with the least R, V and L of several splits they are
a bound of all of those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindllm.deadline import check
from mindllm.planning.zero_bubble.joint_bound import allowed, joint_bound, ways_back
from mindllm.planning.zero_bubble.lone_stages import LoneStages, Options

NEVER = -(10**9)
BEFORE, LATER, EARLIER = range(3)
"""A micro-batch starts behind the end of an earlier one, or waits for it where they cross, or the earlier one waits."""
GRAIN = 400  # parts of a way and its weight gradient, to which times are rounded
COMPARED = 64  # states with which all others are compared
MOST = 5  # micro-batches under way, of which all ways to cross are tried
NEAR = 0.75  # of the limit: a stage whose micro-batches in turn take less is not looked at
WIDTHS = (32, 64, 128, 256, 512)  # of the front, one after another


@dataclass(frozen=True)
class Trip:
    """What a micro-batch takes from a stage to the last one and back.

    Attributes:
        forward, backward, weight: times of the stage itself; ``backward`` is without the weight gradient, as everywhere here.
        turned: R, the way to the stage itself, to the next, ... to the last and back, ``[stages]``.
        beyond: V, from the stage behind each of them to the last and back, ``[stages]``; 0 behind the last.
    """

    forward: float
    backward: float
    weight: float
    turned: np.ndarray
    beyond: np.ndarray


def crossing_time(trip: Trip, under_way: int, micro_batches: int, width: int, deadline: float = math.inf) -> float:
    """From the first forward pass on the stage to the last weight gradient there, at least.

    Args:
        trip: the least times of the stages.
        under_way: micro-batches that the stage may hold.
        micro_batches: of a step.
        width: states that are kept.

    Raises:
        OutOfTime: at ``deadline``.
    """
    whole = trip.turned[-1] + trip.weight
    under_way = min(under_way, micro_batches)
    if under_way < 2 or not whole:
        return micro_batches * float(whole)
    unit = whole / GRAIN
    walk = _Walk(trip, under_way, unit)
    states = walk.start()
    for number in range(micro_batches):
        check(deadline)
        states = _merged(_front(walk.step(states, number)), width)
    return float(states[:, 1 + under_way].min() + walk.weight) * unit


class _Walk:
    """From micro-batch to micro-batch.

    A state, ``[2 x under way]``, is when the stage has room for the next one, the start of the last one, and e and q of the last
    ones as far as they are known, the latest first.
    """

    def __init__(self, trip: Trip, under_way: int, unit: float) -> None:
        self.others = under_way - 1
        self.forward, self.backward, self.weight, self.turned, self.beyond = (
            np.floor(np.asarray(time) / unit + 1e-9).astype(int)
            for time in (trip.forward, trip.backward, trip.weight, trip.turned, trip.beyond)
        )
        self.whole = self.turned[-1]
        self.choices = np.array([
            (*waits, *[BEFORE] * before)
            for before in range(under_way)
            for waits in itertools.product((LATER, EARLIER), repeat=self.others - before)
        ])  # fmt: skip

    def start(self) -> np.ndarray:
        """The state before the first micro-batch."""
        states = np.full((1, 2 * self.others + 2), NEVER)
        states[0, 0] = 0
        return states

    def step(self, states: np.ndarray, number: int) -> np.ndarray:
        """All states after the micro-batch with this number: there may be fewer before it."""
        choices = self.choices[(self.choices[:, number:] == BEFORE).all(axis=1)]
        room, last, gone, ends = np.split(states[:, None], [1, 2, 2 + self.others], axis=2)
        start = np.maximum(room, last + self.forward)[:, :, 0]
        start = np.maximum(start, np.where(choices == BEFORE, ends, NEVER).max(axis=2))
        ends = np.repeat(ends, len(choices), axis=1)
        gone = np.broadcast_to(gone, ends.shape)
        possible = np.ones(start.shape, bool)
        far = len(self.turned) - 1
        since = np.repeat(start[:, :, None], far + 1, axis=2)  # e(j, x)
        for other in reversed(range(self.others)):
            choice = choices[:, other]
            no_wait = since + self.turned <= ends[:, :, other, None]
            place = no_wait.sum(axis=2) - 1
            possible &= (choice != LATER) | (place >= 0)
            place = np.minimum(place + (choice == EARLIER), far)
            turned = np.take_along_axis(since, np.maximum(place, 0)[:, :, None], axis=2)[:, :, 0] + self.turned[place]
            ends[:, :, other] = np.maximum(ends[:, :, other], np.where(choice == EARLIER, turned, NEVER))
            held = np.where((choice == BEFORE) | (place == far), NEVER, gone[:, :, other] + self.beyond[place])
            behind = np.arange(far + 1) > place[:, :, None]
            since = np.where(behind, np.maximum(since, held[:, :, None]), since)
        return self._after(gone, ends, start, since[:, :, -1])[possible]

    def _after(self, gone: np.ndarray, ends: np.ndarray, start: np.ndarray, since: np.ndarray) -> np.ndarray:
        """States ``[states, choices, moments]``, the last micro-batch with them."""
        for other in reversed(range(self.others - 1)):
            ends[:, :, other] = np.maximum(ends[:, :, other], ends[:, :, other + 1] + self.backward)
        end = np.maximum(since + self.whole, ends[:, :, 0] + self.backward)
        room = ends[:, :, -1:] + self.weight
        latest = [moment[:, :, None] for moment in (start, since, end)]
        parts = (room, *latest[:2], gone[:, :, :-1], latest[2], ends[:, :, :-1])
        return np.maximum(np.concatenate(parts, axis=2), NEVER)


def _front(states: np.ndarray) -> np.ndarray:
    """States that no other is better than in all moments."""
    left = states[np.argsort(states.sum(axis=1), kind="stable")]
    kept = []
    while len(left):
        best = left[:COMPARED]
        no_worse = _no_worse(best, left)
        no_worse &= np.arange(len(left)) > np.arange(len(best))[:, None]
        beaten = no_worse.any(axis=0)
        kept.append(best[~beaten[: len(best)]])
        left = left[len(best) :][~beaten[len(best) :]]
    return np.concatenate(kept)


def _no_worse(states: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether a state is as early as another in all moments, ``[states, others]``."""
    found = np.ones((len(states), len(others)), bool)
    for mine, theirs in zip(states.T, others.T, strict=True):
        found &= mine[:, None] <= theirs
    return found


def _merged(states: np.ndarray, width: int) -> np.ndarray:
    """Neighbours made one, until there are no more than ``width``."""
    if len(states) <= width:
        return states
    states = states[np.lexsort((states[:, 0], states[:, 1], states[:, 1 + states.shape[1] // 2]))]
    return np.minimum.reduceat(states, np.unique(np.arange(len(states)) * width // len(states), return_index=True)[1])


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
