"""The operators of a model by path, such as ``model.layers.0.attention.wq.matmul``: what shardings and patterns address."""

from __future__ import annotations

from mindspore import nn
from mindspore.ops import Primitive


def operators_of(cell: nn.Cell) -> dict[str, Primitive]:
    """The operators a cell holds as attributes itself, by attribute name."""
    return {name: value for name, value in vars(cell).items() if isinstance(value, Primitive)}


def operators(root: nn.Cell) -> dict[str, Primitive]:
    """Every operator below ``root``, by dotted path from it."""
    found: dict[str, Primitive] = {}
    for path, cell in root.cells_and_names():
        for name, operator in operators_of(cell).items():
            found[f"{path}.{name}" if path else name] = operator
    return found
