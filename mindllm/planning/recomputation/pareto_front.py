"""Pareto fronts of recompute mixes, as columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
        """The mixes at these indices."""
        return Front(self.activation[chosen], self.working[chosen], self.backward[chosen], self.counts[chosen])

    def levels(self) -> list[tuple[float, Front]]:
        """The mixes by their working memory; of those with the same, time falls as activation rises."""
        if not len(self.working) or np.ptp(self.working) == 0:
            return [(level, self) for level in self.working[:1]]
        return [(level, self.take(np.flatnonzero(self.working == level))) for level in np.unique(self.working)]


def thinned(front: Front, most: int) -> Front:
    """The extremes and the mixes nearest under an even ladder of activations, where there are more than ``most``."""
    if len(front.backward) <= most:
        return front
    ladder = np.linspace(front.activation[0], front.activation[-1], most)
    kept = np.unique(np.searchsorted(front.activation, ladder + 1e-9, side="right") - 1)
    return front.take(kept)


def pruned(fronts: Sequence[Front]) -> Front:
    """The union of fronts without what another mix of it is no worse than."""
    names = ("activation", "working", "backward", "counts")
    every = Front(*(np.concatenate([getattr(front, name) for front in fronts]) for name in names))
    alike = not len(every.working) or np.ptp(every.working) == 0
    return every.take(_falling(every) if alike else _undominated(every))


def _falling(front: Front) -> np.ndarray:
    """Mixes of less and less time by rising activation, of those that have the same working memory."""
    order = np.lexsort((front.backward, front.activation))
    backward = front.backward[order]
    least = np.minimum.accumulate(backward)
    kept = np.ones(len(order), bool)
    kept[1:] = backward[1:] < least[:-1] - 1e-12 * np.abs(least[:-1])
    return order[kept]


def _undominated(front: Front) -> np.ndarray:
    """Mixes, by rising activation, than which none has less activation, less at the fullest moment, and less time."""
    peak = front.activation + front.working
    order = np.lexsort((front.backward, peak, front.activation))
    peaks, times, kept = list[float](), list[float](), list[int]()  # least time by rising peak, of the mixes so far
    for index in order.tolist():
        own, time = peak[index], front.backward[index]
        place = bisect_right(peaks, own)
        if place and times[place - 1] <= time:
            continue
        worse = place
        while worse < len(times) and times[worse] >= time:
            worse += 1
        peaks[place:worse], times[place:worse] = [own], [time]
        kept.append(index)
    return np.array(kept, int)
