"""The operators of a model by path, such as ``model.layers.0.attention.wq.matmul``, by which shardings and patterns name them."""

from __future__ import annotations

from mindspore import nn
from mindspore.ops import Primitive


def cell_operators(cell: nn.Cell) -> dict[str, Primitive]:
    """Return the operators that a cell has as attributes, by attribute name."""
    return {name: value for name, value in vars(cell).items() if isinstance(value, Primitive)}


def operators(root: nn.Cell) -> dict[str, Primitive]:
    """Return every operator below ``root`` by dotted path from it."""
    by_path: dict[str, Primitive] = {}
    for path, cell in root.cells_and_names():
        for name, operator in cell_operators(cell).items():
            by_path[f"{path}.{name}" if path else name] = operator
    return by_path
