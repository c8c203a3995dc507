"""The recompute mixes worth considering for a run of layers: no other needs less memory and less time.

Counts of a YAML take the first layers of a place, so the layers of a place must be written from the most recomputed to the least,
each kind holding the next; a mix that no list can say (one layer ``select``, one ``comm``) is not a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from toolkit.pipeline_balance.problem import Problem

Runs = tuple[tuple[int, int], ...]  # (index of a layer kind, how many), in model order
Names = tuple[str, ...]
ROUGH = 96  # mixes of each of two runs that are combined where not all are asked for


@dataclass(frozen=True)
class Front:
    """Mixes by rising activation and falling backward time.

    Attributes:
        activation: MB per micro-batch, ``[mixes]``.
        backward: time, ``[mixes]``.
        counts: layers of each ``(layer kind, recompute kind)``, ``[mixes, layer kinds, recompute kinds]``.
    """

    activation: np.ndarray
    backward: np.ndarray
    counts: np.ndarray

    def fastest_within(self, capacity_mb: float) -> int:
        """Index of the mix with the least backward time whose activation fits; -1 when none does."""
        return int(np.searchsorted(self.activation, capacity_mb + 1e-9, side="right")) - 1


class Mixes:
    """Fronts of all runs of layers of one problem, made when asked for.

    ``transients`` are the working memories that kinds need; a front is of the kinds that need no more than one of them.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.transients = sorted({kind.transient_mb for layer in problem.layers for kind in layer.kinds.values()})
        self._chains = tuple(tuple(chain) for chain in chains(problem))
        self._made: dict[tuple[Names, float, Runs], list[Front]] = {}

    @cache  # noqa: B019 - lives as long as the problem it is of
    def front(self, runs: Runs, transient_mb: float, most: int | None = None) -> Front:
        """The mixes of ``runs`` with kinds whose working memory is at most ``transient_mb``; empty when there are none.

        With ``most``, no more than about that many, spread over all of them.
        """
        if most is None or len(runs) != 2:
            found = _pruned([part for chain in self._chains for part in self._by_rank(chain, transient_mb, runs)])
        else:
            pairs = [[thinned(front, ROUGH) for front in pair] for pair in self._pairs(runs, transient_mb)]
            found = _pruned([_sums(*pair) for pair in pairs])
        return found if most is None else thinned(found, most)

    def fastest(self, runs: Runs, transient_mb: float, capacity_mb: float) -> tuple[float, np.ndarray] | None:
        """Least backward time of a mix whose activation fits, and its counts; None when none does."""
        if len(runs) != 2:
            front = self.front(runs, transient_mb)
            index = front.fastest_within(capacity_mb)
            return (float(front.backward[index]), front.counts[index]) if index >= 0 else None
        best, counts = np.inf, None
        for first, second in self._pairs(runs, transient_mb):
            if not len(first.backward) or not len(second.backward):
                continue
            rest = capacity_mb - first.activation
            partner = np.searchsorted(second.activation, rest + 1e-9, side="right") - 1
            times = np.where(partner >= 0, first.backward + second.backward[partner], np.inf)
            index = int(times.argmin())
            if times[index] < best:
                best, counts = float(times[index]), first.counts[index] + second.counts[partner[index]]
        return None if counts is None else (best, counts)

    def _pairs(self, runs: Runs, transient_mb: float) -> list[tuple[Front, Front]]:
        """Fronts of the first and the second of two runs that may stand together: the second recomputed no more."""
        first, second = (runs[:1], runs[1:])
        if self.problem.yaml_kinds is None:
            return [
                (
                    self._single(self._chains[0], transient_mb, first),
                    self._single(self._chains[0], transient_mb, second),
                )
            ]
        return [
            (self._single(chain[: rank + 1], transient_mb, first), self._single(chain[rank:], transient_mb, second))
            for chain in self._chains
            for rank in range(len(chain))
        ]

    @cache  # noqa: B019
    def _single(self, names: Names, transient_mb: float, runs: Runs) -> Front:
        return _pruned(self._by_rank(names, transient_mb, runs))

    def runs(self, start: int, count: int) -> Runs:
        """The layer kinds of ``count`` layers from ``start`` on."""
        found: list[tuple[int, int]] = []
        for kind in self.problem.layer_order[start : start + count]:
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1] + 1)
            else:
                found.append((kind, 1))
        return tuple(found)

    def written(self, runs: Runs, counts: np.ndarray) -> list[str]:
        """Recompute kind of every layer of a mix, from the most recomputed to the least."""
        names = self.problem.kind_names
        for chain in self._chains:
            order = [names.index(name) for name in chain]
            if counts.sum() == counts[:, order].sum():
                return [names[kind] for layer, _ in runs for kind in order for _ in range(counts[layer, kind])]
        raise ValueError("no order of these kinds can be written")

    def _by_rank(self, names: Names, transient_mb: float, runs: Runs) -> list[Front]:
        """Fronts by the rank of their last layer in the chain; a later layer may not be recomputed more."""
        key = (names, transient_mb, runs)
        if key not in self._made:
            kind, count = runs[-1]
            rest = (*runs[:-1], (kind, count - 1)) if count > 1 else runs[:-1]
            before = self._by_rank(names, transient_mb, rest) if rest else [self._nothing()]
            free = self.problem.yaml_kinds is None and count == 1
            self._made[key] = [
                self._with_layer(_pruned(before if free else before[: rank + 1]), kind, name, transient_mb)
                for rank, name in enumerate(names)
            ]
        return self._made[key]

    def _nothing(self) -> Front:
        return Front(
            np.zeros(1), np.zeros(1), np.zeros((1, len(self.problem.layers), len(self.problem.kind_names)), int)
        )

    def _with_layer(self, front: Front, layer: int, name: str, transient_mb: float) -> Front:
        cost = self.problem.layers[layer].kinds.get(name)
        if cost is None or cost.transient_mb > transient_mb:
            return Front(front.activation[:0], front.backward[:0], front.counts[:0])
        counts = front.counts.copy()
        counts[:, layer, self.problem.kind_names.index(name)] += 1
        return Front(front.activation + cost.activation_mb, front.backward + cost.backward, counts)


def chains(problem: Problem) -> Sequence[Sequence[str]]:
    """Sets of kinds that may stand together in a place, each from the most recomputed to the least."""
    kinds = problem.yaml_kinds
    if kinds is None:
        return [problem.kind_names]
    names = sorted(kinds, key=lambda name: (not kinds[name].recompute, -len(kinds[name].marks)))
    found: list[list[str]] = []

    def extend(chain: list[str], left: list[str]) -> None:
        following = [name for name in left if not chain or kinds[chain[-1]].holds(kinds[name])]
        direct = [
            n for n in following if not any(o != n and kinds[o].holds(kinds[n]) and _before(o, n) for o in following)
        ]
        for name in direct:
            extend([*chain, name], [other for other in following if other != name])
        if not direct:
            found.append(chain)

    def _before(one: str, other: str) -> bool:
        return names.index(one) < names.index(other)

    extend([], names)
    return found


def thinned(front: Front, most: int) -> Front:
    """The extremes and the mixes nearest under an even ladder of activations, where there are more than ``most``."""
    if len(front.backward) <= most:
        return front
    ladder = np.linspace(front.activation[0], front.activation[-1], most)
    kept = np.unique(np.searchsorted(front.activation, ladder + 1e-9, side="right") - 1)
    return Front(front.activation[kept], front.backward[kept], front.counts[kept])


def _sums(first: Front, second: Front) -> Front:
    """All mixes of one front with all of another."""
    one, other = np.indices((len(first.backward), len(second.backward))).reshape(2, -1)
    return Front(
        first.activation[one] + second.activation[other],
        first.backward[one] + second.backward[other],
        first.counts[one] + second.counts[other],
    )


def _pruned(fronts: Sequence[Front]) -> Front:
    """The union of fronts without what another point of it is no worse than."""
    activation = np.concatenate([front.activation for front in fronts])
    backward = np.concatenate([front.backward for front in fronts])
    order = np.lexsort((backward, activation))
    backward = backward[order]
    least = np.minimum.accumulate(backward)
    kept = np.ones(len(order), bool)
    kept[1:] = backward[1:] < least[:-1] - 1e-12 * np.abs(least[:-1])
    order = order[kept]
    counts = np.concatenate([front.counts for front in fronts])
    return Front(activation[order], backward[kept], counts[order])
