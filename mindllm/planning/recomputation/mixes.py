"""The recompute mixes worth considering for a run of layers: the Pareto front of memory and time.

The memory of a mix has two sums: the activations that it keeps of every micro-batch, and those plus its working memory, which the
micro-batch in its backward pass needs. A mix is dropped if another one has no more of both and takes no longer.

Counts of a YAML take the first layers of a place. So the layers of a place are written from the most recomputed to the least,
each kind including the next. A mix that no list expresses (one layer ``select``, one ``comm``) is not a candidate.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from mindllm.deadline import check
from mindllm.planning.problem import Problem

Runs = tuple[tuple[int, int], ...]  # (index of a layer kind, how many), in model order
Names = tuple[str, ...]
ROUGH = 96  # mixes of each of two runs that are combined where not all are asked for


@dataclass(frozen=True)
class Front:
    """Mixes by rising activation.

    Attributes:
        activation: MB per micro-batch, ``[mixes]``.
        working: MB that the backward pass needs beyond that, ``[mixes]`` (``schedules/held_memory.py``).
        backward: time, ``[mixes]``.
        counts: layers of each ``(layer kind, recompute kind)``, ``[mixes, layer kinds, recompute kinds]``.
    """

    activation: np.ndarray
    working: np.ndarray
    backward: np.ndarray
    counts: np.ndarray

    def take(self, chosen: np.ndarray) -> Front:
        """Return the mixes at these indices."""
        return Front(self.activation[chosen], self.working[chosen], self.backward[chosen], self.counts[chosen])

    def levels(self) -> list[tuple[float, Front]]:
        """Return the mixes by their working memory; at a level, time falls as activation rises."""
        if not len(self.working) or np.ptp(self.working) == 0:
            return [(level, self) for level in self.working[:1]]
        return [(level, self.take(np.flatnonzero(self.working == level))) for level in np.unique(self.working)]


def thinned(front: Front, most: int) -> Front:
    """Return at most ``most`` mixes: the extremes, and the nearest below an even ladder of activations."""
    if len(front.backward) <= most:
        return front
    ladder = np.linspace(front.activation[0], front.activation[-1], most)
    chosen = np.unique(np.searchsorted(front.activation, ladder + 1e-9, side="right") - 1)
    return front.take(chosen)


def pruned(fronts: Sequence[Front]) -> Front:
    """Return the union of fronts without dominated mixes."""
    names = ("activation", "working", "backward", "counts")
    every = Front(*(np.concatenate([getattr(front, name) for front in fronts]) for name in names))
    same_working = not len(every.working) or np.ptp(every.working) == 0
    return every.take(_falling(every) if same_working else _undominated(every))


def _falling(front: Front) -> np.ndarray:
    """Return the mixes of falling time by rising activation; all have equal working memory."""
    order = np.lexsort((front.backward, front.activation))
    backward = front.backward[order]
    least = np.minimum.accumulate(backward)
    falling = np.ones(len(order), bool)
    falling[1:] = backward[1:] < least[:-1] - 1e-12 * np.abs(least[:-1])
    return order[falling]


def _undominated(front: Front) -> np.ndarray:
    """Return the mixes, by rising activation, that no other mix dominates in activation, peak and time."""
    peak = front.activation + front.working
    order = np.lexsort((front.backward, peak, front.activation))
    peaks, times, dominant = list[float](), list[float](), list[int]()  # least time by rising peak, of the mixes so far
    for index in order.tolist():
        mix_peak, time = peak[index], front.backward[index]
        place = bisect_right(peaks, mix_peak)
        if place and times[place - 1] <= time:
            continue
        worse = place
        while worse < len(times) and times[worse] >= time:
            worse += 1
        peaks[place:worse], times[place:worse] = [mix_peak], [time]
        dominant.append(index)
    return np.array(dominant, int)


class Mixes:
    """Fronts of all runs of layers of a problem, computed on demand; after ``deadline`` raises :class:`OutOfTime`."""

    def __init__(self, problem: Problem, deadline: float = math.inf) -> None:
        self.problem, self.deadline = problem, deadline
        self._chains = tuple(tuple(chain) for chain in chains(problem))
        self._ends = list(itertools.accumulate(layer.count for layer in problem.layers))
        self._made: dict[tuple[Names, Runs], list[Front]] = {}

    @cache  # noqa: B019 - lives as long as the problem it is of
    def front(self, runs: Runs, most: int | None = None) -> Front:
        """Return the mixes of ``runs``; with ``most`` about that many, spread over all."""
        if most is None or len(runs) != 2:
            combined = pruned([part for chain in self._chains for part in self._by_rank(chain, runs)])
        else:
            pairs = [[thinned(front, ROUGH) for front in pair] for pair in self._pairs(runs)]
            combined = pruned([self._sums(*pair) for pair in pairs])
        return combined if most is None else thinned(combined, most)

    def fastest(self, runs: Runs, alive: int, room_mb: float, tail_mb: float = 0.0) -> tuple[float, np.ndarray] | None:
        """Return the least backward time of a mix that fits with ``alive`` micro-batches, and its counts; None if none fits.

        ``tail_mb`` is working memory that is always needed.
        """
        candidates = [
            fastest
            for parts in (self._pairs(runs) if len(runs) == 2 else [(self._empty_front(), self.front(runs))])
            if (fastest := self._fastest_pair(*parts, alive, room_mb, tail_mb)) is not None
        ]
        return min(candidates, key=lambda fastest: fastest[0], default=None)

    def _fastest_pair(
        self, first: Front, second: Front, alive: int, room_mb: float, tail_mb: float
    ) -> tuple[float, np.ndarray] | None:
        """Return the fastest mix of two runs of layers; the first run goes backward last."""
        room = room_mb + 1e-9 * alive
        best, counts = np.inf, None
        for working, level in second.levels():
            check(self.deadline)
            most = (room - max(working, tail_mb)) / alive - first.activation
            rest = room - first.working - alive * first.activation  # for the first run's own moment
            later_alive = alive - 1
            most = np.where(rest < 0, -np.inf, np.minimum(most, rest / later_alive if later_alive else np.inf))
            partner = np.searchsorted(level.activation, most, side="right") - 1
            times = np.where(partner >= 0, first.backward + level.backward[partner], np.inf)
            index = int(times.argmin()) if len(times) else -1
            if index >= 0 and times[index] < best:
                best, counts = float(times[index]), first.counts[index] + level.counts[partner[index]]
        return None if counts is None else (best, counts)

    def _pairs(self, runs: Runs) -> list[tuple[Front, Front]]:
        """Return the fronts of two runs that may be in one place: the second is recomputed no more than the first."""
        first, second = (runs[:1], runs[1:])
        if self.problem.yaml_kinds is None:
            return [(self._single(self._chains[0], first), self._single(self._chains[0], second))]
        return [
            (self._single(chain[: rank + 1], first), self._single(chain[rank:], second))
            for chain in self._chains
            for rank in range(len(chain))
        ]

    @cache  # noqa: B019
    def _single(self, names: Names, runs: Runs) -> Front:
        return pruned(self._by_rank(names, runs))

    def runs(self, start: int, count: int) -> Runs:
        """Return the layer kinds of ``count`` layers from ``start`` on."""
        within = [
            (kind, min(start + count, end) - max(start, end - self.problem.layers[kind].count))
            for kind, end in enumerate(self._ends)
        ]
        return tuple((kind, number) for kind, number in within if number > 0)

    def written(self, runs: Runs, counts: np.ndarray) -> list[str]:
        """Return the recompute kind of every layer of a mix, from the most recomputed to the least.

        Raises:
            ValueError: no list of a YAML expresses the mix: kinds of two chains, or a run recomputed more than the one before.
        """
        names, free = self.problem.kind_names, self.problem.yaml_kinds is None
        for chain in self._chains:
            order = [names.index(name) for name in chain]
            if counts.sum() == counts[:, order].sum():
                ranks = [rank for layer, _ in runs for rank in np.repeat(np.arange(len(order)), counts[layer, order])]
                if free or ranks == sorted(ranks):
                    return [chain[rank] for rank in ranks]
        raise ValueError("no order of these kinds can be written")

    def instead(self, runs: Runs, counts: np.ndarray) -> np.ndarray | None:
        """Return the fastest mix that a YAML expresses and that keeps no more than this one; None if there is none."""
        layers, names = self.problem.layers, self.problem.kind_names
        activation = sum(
            count * layers[layer].kinds[name].activation_mb
            for layer, _ in runs
            for name, count in zip(names, counts[layer], strict=True)
            if count
        )
        front = self.front(runs)
        times = np.where(front.activation <= activation * (1 + 1e-9), front.backward, np.inf)
        return front.counts[times.argmin()] if np.isfinite(times).any() else None

    def _by_rank(self, names: Names, runs: Runs) -> list[Front]:
        """Return fronts by the rank of their last layer in the chain; a later layer may not be recomputed more."""
        key = (names, runs)
        if key not in self._made:
            check(self.deadline)
            kind, count = runs[-1]
            rest = (*runs[:-1], (kind, count - 1)) if count > 1 else runs[:-1]
            before = self._by_rank(names, rest) if rest else [self._empty_front()]
            free = self.problem.yaml_kinds is None and count == 1
            self._made[key] = [
                self._with_layer(pruned(before if free else before[: rank + 1]), kind, name)
                for rank, name in enumerate(names)
            ]
        return self._made[key]

    def _empty_front(self) -> Front:
        counts = np.zeros((1, len(self.problem.layers), len(self.problem.kind_names)), int)
        return Front(np.zeros(1), np.zeros(1), np.zeros(1), counts)

    def _with_layer(self, front: Front, layer: int, name: str) -> Front:
        """Return every mix with one more layer after it, whose backward pass comes first."""
        cost = self.problem.layers[layer].kinds.get(name)
        if cost is None:
            return front.take(np.arange(0))
        counts = front.counts.copy()
        counts[:, layer, self.problem.kind_names.index(name)] += 1
        if self.problem.v_shape:
            more = self.problem.full_activation_mb[layer] - cost.activation_mb  # computed again
            before = self._again(front)
            working = np.maximum(front.working - before, cost.transient_mb - more) + before + more
        else:
            working = np.maximum(front.working - cost.activation_mb, cost.transient_mb)
        return Front(front.activation + cost.activation_mb, working, front.backward + cost.backward, counts)

    def _again(self, front: Front) -> np.ndarray:
        """Return the MB that the layers of each mix recompute, ``[mixes]``."""
        return front.counts.sum(axis=2) @ np.array(self.problem.full_activation_mb) - front.activation

    def _sums(self, first: Front, second: Front) -> Front:
        """Return all mixes of one front combined with all of another, whose layers follow."""
        first_index, second_index = np.indices((len(first.backward), len(second.backward))).reshape(2, -1)
        if self.problem.v_shape:
            again, second_again = self._again(first)[first_index], self._again(second)[second_index]
            working = (
                np.maximum(first.working[first_index] - again, second.working[second_index] - second_again)
                + again
                + second_again
            )
        else:
            working = np.maximum(
                first.working[first_index] - second.activation[second_index], second.working[second_index]
            )
        return Front(
            first.activation[first_index] + second.activation[second_index],
            working,
            first.backward[first_index] + second.backward[second_index],
            first.counts[first_index] + second.counts[second_index],
        )


def chains(problem: Problem) -> Sequence[Sequence[str]]:
    """Return sets of kinds that may be in one place, each from the most recomputed to the least."""
    kinds = problem.yaml_kinds
    if kinds is None:
        return [problem.kind_names]
    names = sorted(kinds, key=lambda name: (not kinds[name].recompute, -len(kinds[name].marks)))
    complete: list[list[str]] = []

    def extend(chain: list[str], remaining: list[str]) -> None:
        following = [name for name in remaining if not chain or kinds[chain[-1]].includes(kinds[name])]
        direct = [
            n for n in following if not any(o != n and kinds[o].includes(kinds[n]) and _before(o, n) for o in following)
        ]
        for name in direct:
            extend([*chain, name], [candidate for candidate in following if candidate != name])
        if not direct:
            complete.append(chain)

    def _before(first: str, second: str) -> bool:
        return names.index(first) < names.index(second)

    extend([], names)
    return complete
