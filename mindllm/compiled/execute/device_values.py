"""The values of a single device by place, and whether one of a rank is a part of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mindllm.compiled.execute.blocks import Rows, allowed_error, is_block
from mindllm.compiled.execute.records import Place, Record


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
        """The largest absolute error of a part of a value that is rounding."""
        if id(whole) not in self._allowed:
            self._allowed[id(whole)] = allowed_error(whole.value, self.tolerance)
        return self._allowed[id(whole)]

    def has(self, place: Place, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of one of the values at ``place``."""
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in self.records.get(place, ()))

    def has_rows(self, place: Place, value: np.ndarray) -> bool:
        """Whether its rows are among those of one of the values at ``place``."""
        if place not in self._rows:
            self._rows[place] = [Rows(whole.value, self.tolerance) for whole in self.records.get(place, ())]
        return any(rows.have(value) for rows in self._rows[place])

    def in_cell(self, place: Place, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of any value of the cell; in the backward pass, of any there is."""
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in self._of_cells.get(place[:2], ()))

    def knows_operand(self, place: Place, index: int) -> bool:
        """Whether something computed operand ``index`` of an operator at ``place``: nothing computes a parameter."""
        return any(record.operands[index : index + 1] not in ((), (None,)) for record in self.records.get(place, ()))

    def has_operand(self, place: Place, index: int, value: np.ndarray) -> bool:
        """Whether ``value`` is an aligned block of operand ``index`` of one of the operators at ``place``."""
        operands = [record.operands[index] for record in self.records.get(place, ()) if index < len(record.operands)]
        return any(is_block(value, whole.value, self.allowed(whole)) for whole in operands if whole is not None)
