r"""Operator patterns of ``recompute_config``: ``feed_forward\.w1\.activation\.silu``, relative to a decoder layer.

A backslash and a dot separate levels; every level is a regular expression that must match a whole name on that level, so
``.*`` stays on its level. The last level names operators, or cells. A pattern that matches nothing is an error here; in
MindFormers it silently does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mindspore import nn
from mindspore.ops import Primitive

from mindllm.config.recompute import LEVEL_SEPARATOR, forms_of
from mindllm.errors import nearest
from mindllm.parallel.operators import operators, operators_of


@dataclass(frozen=True)
class Match:
    """What a pattern found in a layer: an operator or a cell, at a dotted path."""

    path: str
    target: Primitive | nn.Cell

    @property
    def is_operator(self) -> bool:
        return isinstance(self.target, Primitive)


def match(layer: nn.Cell, pattern: str) -> list[Match]:
    """Everything in ``layer`` that ``pattern`` names."""
    return [found for form in forms_of(pattern) for found in _match(layer, form.split(LEVEL_SEPARATOR), "")]


def match_some(layer: nn.Cell, pattern: str, operators_only: bool) -> list[Match]:
    """As :func:`match`.

    Raises:
        ValueError: nothing is found, or only cells where an operator is needed; says what is nearest.
    """
    found = match(layer, pattern)
    if operators_only and any(item.is_operator for item in found):
        return [item for item in found if item.is_operator]
    if found and not operators_only:
        return found
    reason = "names a cell, not an operator" if found else "matches no operator of a layer"
    candidates = [path.replace(".", LEVEL_SEPARATOR) for path in operators(layer)]
    below = [path for path in candidates if found and path.startswith(found[0].path.replace(".", LEVEL_SEPARATOR))]
    raise ValueError(f"pattern '{pattern}' {reason}{nearest(pattern, below or candidates)}")


def _match(cell: nn.Cell, levels: list[str], path: str) -> Iterator[Match]:
    level, *rest = levels
    cells = {name: child for name, child in cell.name_cells().items() if re.fullmatch(level, name)}
    if rest:
        for name, child in cells.items():
            yield from _match(child, rest, f"{path}{name}.")
        return
    for name, operator in operators_of(cell).items():
        if re.fullmatch(level, name):
            yield Match(path + name, operator)
    for name, child in cells.items():
        yield Match(path + name, child)
