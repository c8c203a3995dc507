"""Values of a single device by place, and whether a rank's value is a part of one of them.

A part is one of the equal blocks that a value is cut into, or such a block with its rows elsewhere. Values are compared by
content, so no layout has to be known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from mindllm.compiled.execute.records import Place, Record

MOST_TIES = 4
"""Rows on either side of a row, in the order of their fingerprints, that are compared with it element by element."""


def is_block(value: np.ndarray, whole: np.ndarray, allowed: float) -> bool:
    """Return True if ``value`` is one of the equal blocks that ``whole`` is cut into along some dimensions. NaN equals NaN."""
    if value.dtype == bool or whole.dtype == bool:
        return _divides(value, whole)
    return next(places(value, whole, allowed), None) is not None


def places(value: np.ndarray, whole: np.ndarray, allowed: float) -> Iterator[tuple[int, ...]]:
    """Yield the indices of ``value`` among the equal blocks of ``whole``, along each dimension."""
    if not _divides(value, whole):
        return
    corners = whole[tuple(slice(None, None, n) for n in value.shape)]
    first = value[(0,) * value.ndim]
    near = np.abs(corners - first) <= allowed if np.isfinite(first) else _near(corners, first, allowed)
    for index in np.argwhere(near) if near.any() else ():
        block = whole[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, value.shape, strict=True))]
        if np.all(_near(block, value, allowed)):
            yield tuple(map(int, index))


def _near(one: np.ndarray, other: np.ndarray, allowed: float) -> np.ndarray:
    """Compare like ``np.isclose`` with an absolute tolerance and equal infinities and NaN, at a quarter of its cost.

    What it warns of, the difference of infinities, is silenced by who compares.
    """
    return (np.abs(one - other) <= allowed) | (one == other) | ((one != one) & (other != other))


def _divides(value: np.ndarray, whole: np.ndarray) -> bool:
    return value.ndim == whole.ndim and all(
        n and not size % n for size, n in zip(whole.shape, value.shape, strict=True)
    )


class Rows:
    """The rows of a whole array, along its last dimension, to be found wherever they stand.

    So is a sequence that ranks share in another order than that of its tokens, or what went from rank to rank, part by part. Rows
    of one element say nothing, and are none; of sorted tokens, those that nobody wrote are not finite and left out.
    """

    def __init__(self, whole: np.ndarray, tolerance: float) -> None:
        self._allowed = allowed_error(whole, tolerance)
        rows = whole.reshape(-1, whole.shape[-1]) if whole.ndim else whole.reshape(1, 1)
        self._rows = rows[np.isfinite(rows).all(-1)] if rows.dtype != bool else rows[:0]
        self._sorted: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    def have(self, value: np.ndarray) -> bool:
        """Return True if every row of ``value`` is one of these rows, or the same equal part of one."""
        width, (count, full) = value.shape[-1] if value.ndim else 0, self._rows.shape
        if width < 2 or full % width or not count or value.dtype == bool:
            return False
        rows = value.reshape(-1, width)
        rows = rows[np.isfinite(rows).all(-1)]
        parts = self._parts(width)
        return bool(len(rows)) and any(self._among(rows[:1], *part) and self._among(rows, *part) for part in parts)

    def _parts(self, width: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield each part of the rows of this width, the order of their fingerprints, and the fingerprints."""
        if width not in self._sorted:
            weights = _fingerprint(width)
            parts = np.split(self._rows, self._rows.shape[1] // width, axis=1)
            marks = [part @ weights for part in parts]
            orders = list(map(np.argsort, marks))
            self._sorted[width] = [
                (part, order, mark[order]) for part, order, mark in zip(parts, orders, marks, strict=True)
            ]
        return self._sorted[width]

    def _among(self, rows: np.ndarray, whole: np.ndarray, order: np.ndarray, marks: np.ndarray) -> bool:
        at = np.searchsorted(marks, rows @ _fingerprint(rows.shape[1]))
        if len(rows) == 1:
            near = order[np.clip(at[0] + np.arange(-MOST_TIES, MOST_TIES), 0, len(order) - 1)]
            return bool((np.abs(whole[near] - rows[0]).max(-1) <= self._allowed).any())
        left = np.ones(len(rows), bool)
        for step in range(-MOST_TIES, MOST_TIES):
            near = order[np.clip(at + step, 0, len(order) - 1)]
            left[left] = np.abs(rows[left] - whole[near[left]]).max(-1) > self._allowed
            if not left.any():
                return True
        return False


@cache
def _fingerprint(width: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.5, 1.5, width)


def allowed_error(whole: np.ndarray, tolerance: float) -> float:
    """Return the largest absolute error due to rounding: ``tolerance`` of the largest finite element."""
    finite = whole[np.isfinite(whole)]
    return tolerance * float(np.max(np.abs(finite), initial=0.0))


@dataclass
class DeviceValues:
    """Values of a single device by place; ``tolerance`` is relative to the largest magnitude of each."""

    tolerance: float
    records: Mapping[Place, list[Record]] = field(default_factory=dict)
    _rows: dict[Place, list[Rows]] = field(default_factory=dict)
    _allowed: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record], tolerance: float) -> DeviceValues:
        by_place: dict[Place, list[Record]] = defaultdict(list)
        for record in records:
            by_place[record.place].append(record)
        return cls(tolerance, by_place)

    @cached_property
    def _of_cells(self) -> Mapping[tuple[bool, str], list[Record]]:
        cells: dict[tuple[bool, str], list[Record]] = defaultdict(list)
        for (backward, path, _), records in self.records.items():
            cells[backward, path] += records
        return cells

    def allowed(self, whole: Record) -> float:
        """Return the largest absolute error of a part of a value that is due to rounding."""
        if id(whole) not in self._allowed:
            self._allowed[id(whole)] = allowed_error(whole.value, self.tolerance)
        return self._allowed[id(whole)]

    def has(self, place: Place, value: np.ndarray) -> bool:
        """Return True if ``value`` is an aligned block of a value at ``place``."""
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in self.records.get(place, ()))

    def has_rows(self, place: Place, value: np.ndarray) -> bool:
        """Return True if its rows are among those of a value at ``place``."""
        if place not in self._rows:
            self._rows[place] = [Rows(whole.value, self.tolerance) for whole in self.records.get(place, ())]
        return any(rows.have(value) for rows in self._rows[place])

    def in_cell(self, place: Place, value: np.ndarray) -> bool:
        """Return True if ``value`` is an aligned block of any value of the cell; in the backward pass, of any value at all."""
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in self._of_cells.get(place[:2], ()))

    def knows_operand(self, place: Place, index: int) -> bool:
        """Return True if operand ``index`` of an operator at ``place`` is computed. A parameter is not."""
        return any(record.operands[index : index + 1] not in ((), (None,)) for record in self.records.get(place, ()))

    def has_operand(self, place: Place, index: int, value: np.ndarray) -> bool:
        """Return True if ``value`` is an aligned block of operand ``index`` of an operator at ``place``."""
        operands = [record.operands[index] for record in self.records.get(place, ()) if index < len(record.operands)]
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in operands if whole is not None)
