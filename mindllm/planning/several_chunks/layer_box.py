"""Sets of plans by bounds on numbers of layers, and ways to divide one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

Names = tuple[str, str]  # of the least and the greatest numbers of layers in a box
PLACES: Names = ("low", "high")
STAGES: Names = ("stage_low", "stage_high")


@dataclass(frozen=True)
class Box:
    """Bounds of numbers of layers: in each place, of each kind there (``[places, layer kinds]``), and of each kind on a stage."""

    low: np.ndarray
    high: np.ndarray
    kind_high: np.ndarray
    stage_low: np.ndarray
    stage_high: np.ndarray

    def bounded(self, names: Names, low: np.ndarray, high: np.ndarray) -> Box:
        """This box with other bounds of its places or stages."""
        return replace(self, **dict(zip(names, (low, high), strict=True)))

    def limited(self, index: int, limits: tuple[int, int], stages: int) -> Box:
        """This box with other bounds of the stage, or behind ``stages`` of the place, at ``index``."""
        names, where = (STAGES, index) if index < stages else (PLACES, index - stages)
        low, high = (_changed(getattr(self, name), where, limit) for name, limit in zip(names, limits, strict=True))
        return self.bounded(names, low, high)

    def size(self) -> float:
        """The sum of all widths."""
        return float((self.high - self.low).sum() + (self.stage_high - self.stage_low).sum())


def above(box: Box, names: Names, members: np.ndarray, most: int) -> Iterator[Box]:
    """No member has more than ``most`` layers; or the first that has more is each in turn."""
    low, high = (getattr(box, name) for name in names)
    yield box.bounded(names, low, _changed(high, members, np.minimum(high[members], most)))
    for number, member in enumerate(members):
        if high[member] > most:
            before = members[:number]
            at_most = _changed(high, before, np.minimum(high[before], most))
            yield box.bounded(names, _changed(low, member, max(low[member], most + 1)), at_most)


def below(box: Box, names: Names, members: np.ndarray, least: int) -> Iterator[Box]:
    """No member has less than ``least`` layers; or the first that has less is each in turn."""
    low, high = (getattr(box, name) for name in names)
    yield box.bounded(names, _changed(low, members, np.maximum(low[members], least)), high)
    for number, member in enumerate(members):
        if low[member] < least:
            before = members[:number]
            at_least = _changed(low, before, np.maximum(low[before], least))
            yield box.bounded(names, at_least, _changed(high, member, min(high[member], least - 1)))


def _changed(values: np.ndarray, where: np.ndarray | int, by: np.ndarray | float) -> np.ndarray:
    found = values.copy()
    found[where] = by
    return found
