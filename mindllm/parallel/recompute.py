r"""Recomputation: marks layers, cells and operators whose results are computed again in the backward pass.

Trading time for memory goes back to Chen et al. (2016); what is selected follows MindFormers. Precedence: an excluded
operator is kept even inside a fully recomputed layer, and full recomputation wins over selected operators.

Operator patterns of ``recompute_config``: ``feed_forward\.w1\.activation\.silu``, relative to a decoder layer.

A backslash and a dot separate levels; every level is a regular expression that must match a whole name on that level, so
``.*`` stays on its level. The last level names operators, or cells. A pattern that matches nothing is an error here; in
MindFormers it silently does nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspore import nn
from mindspore.ops import Primitive

from mindllm.config import RunConfig
from mindllm.config.recompute import LEVEL_SEPARATOR, RecomputeConfig, pattern_forms
from mindllm.errors import nearest
from mindllm.models.pieces import EarlierPieces
from mindllm.parallel.layer_plan import LayerAssignment, LayerPlan
from mindllm.parallel.operators import operators, operators_of

logger = logging.getLogger(__name__)

# Attributes the compiler reads. (Primitive.recompute() can be called only once: the attribute then hides the method.)
OPERATOR = "recompute"
COMMUNICATION = "recompute_comm_op"  # also repeat what the compiler inserted beside the operator
Cells = Sequence[tuple[nn.Cell, LayerAssignment]]
IN_ORDER = ("select_recompute", "select_comm_recompute", "select_recompute_exclude", "select_comm_recompute_exclude")


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
    return [found for form in pattern_forms(pattern) for found in _match(layer, form.split(LEVEL_SEPARATOR), "")]


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


def apply_recompute(layers: Sequence[nn.Cell], plan: LayerPlan, config: RunConfig) -> None:
    """Marks ``layers`` (one cell for each layer of the plan).

    Raises:
        UserError: a pattern that matches nothing, or cells where communication needs operators; names key and pattern.
    """
    cells = tuple(zip(layers, plan.layers, strict=True))
    for number, (layer, assignment) in enumerate(cells):
        if assignment.recompute:
            _recompute_layer(layer, config.recompute_config)
            logger.info("Set full recompute at layer %d", number)
        _select(layer, number, assignment, cells, config)
        _keep_earlier_pieces(layer)


def _keep_earlier_pieces(layer: nn.Cell) -> None:
    """Keeps the keys and values that a piece of a sequence attends to: when it is computed again, later pieces have changed what
    they are made from.
    """
    for cell in layer.cells():
        for held in cell.cells():
            if isinstance(held, EarlierPieces):
                for operator in operators_of(held).values():
                    operator.add_prim_attr(OPERATOR, False)


def _recompute_layer(layer: nn.Cell, options: RecomputeConfig) -> None:
    keywords = {}
    if options.recompute_slice_activation:
        keywords["recompute_slice_activation"] = True
    layer.recompute(mp_comm_recompute=options.mp_comm_recompute, **keywords)


def _select(layer: nn.Cell, number: int, assignment: LayerAssignment, cells: Cells, config: RunConfig) -> None:
    """Switches patterns on, then the excluded ones off.

    A pattern may name something in other layers it is for only; one of those that plain counts stand for need not name
    anything, as long as another does: a feed-forward without a gate multiplies nothing.
    """
    for key in IN_ORDER:
        touched = []
        for pattern in assignment.applied(key):
            if match(layer, pattern) or not (
                assignment.is_default(key)
                or any(match(cell, pattern) for cell, of in cells if pattern in of.applied(key))
            ):
                touched += _apply_pattern(layer, key, pattern, config)
        if touched:
            kind = "comm recompute" if "comm" in key else "recompute"
            action = "exclude" if key.endswith("exclude") else "on"
            logger.info("Set select %s %s at layer %d: %s", kind, action, number, ", ".join(touched))


def _apply_pattern(layer: nn.Cell, key: str, pattern: str, config: RunConfig) -> list[str]:
    """Marks what one pattern finds; returns the paths."""
    communication, on = "comm" in key, not key.endswith("exclude")
    try:
        found = match_some(layer, pattern, operators_only=communication or not on)
    except ValueError as error:
        raise config.error(f"recompute_config.{key}", str(error)) from None
    for item in found:
        if isinstance(item.target, Primitive):
            item.target.add_prim_attr(COMMUNICATION if communication else OPERATOR, on)
        else:
            item.target.recompute()
    return [item.path for item in found]
