"""Sets of plans by bounds on numbers of layers, and ways to divide one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Box:
    """Bounds of numbers of layers: in each place, of each kind there (``[places, layer kinds]``), and of each kind on a stage."""

    low: np.ndarray
    high: np.ndarray
    kind_high: np.ndarray
    stage_low: np.ndarray
    stage_high: np.ndarray

    def places(self, low: np.ndarray, high: np.ndarray) -> Box:
        """This box with other bounds of places."""
        return replace(self, low=low, high=high)

    def limited(self, index: int, limits: tuple[int, int], stages: int) -> Box:
        """This box with other bounds of the stage, or behind ``stages`` of the place, at ``index``."""
        names = ("stage_low", "stage_high") if index < stages else ("low", "high")
        low, high = (getattr(self, name).copy() for name in names)
        where = index if index < stages else index - stages
        low[where], high[where] = limits
        return replace(self, **dict(zip(names, (low, high), strict=True)))

    def size(self) -> float:
        """The sum of all widths."""
        return float((self.high - self.low).sum() + (self.stage_high - self.stage_low).sum())


def above(box: Box, places: np.ndarray, most: int) -> Iterator[Box]:
    """No place has more than ``most`` layers; or the first that has more is each in turn."""
    high = box.high.copy()
    high[places] = np.minimum(high[places], most)
    yield box.places(box.low, high)
    high = box.high.copy()
    for place in places:
        if box.high[place] > most:
            low = box.low.copy()
            low[place] = max(low[place], most + 1)
            yield box.places(low, high.copy())
            high[place] = most


def below(box: Box, places: np.ndarray, least: int) -> Iterator[Box]:
    """No place has less than ``least`` layers; or the first that has less is each in turn."""
    low = box.low.copy()
    low[places] = np.maximum(low[places], least)
    yield box.places(low, box.high)
    low = box.low.copy()
    for place in places:
        if box.low[place] < least:
            high = box.high.copy()
            high[place] = min(high[place], least - 1)
            yield box.places(low.copy(), high)
            low[place] = least


def one_place(box: Box, place: int, most: int) -> Iterator[Box]:
    """A place has at most ``most`` layers, or more."""
    high, low = box.high.copy(), box.low.copy()
    high[place], low[place] = most, most + 1
    yield box.places(box.low, high)
    yield box.places(low, box.high)
