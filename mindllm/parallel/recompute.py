r"""Recomputation: marks of layers, cells and operators whose results are recomputed in the backward pass.

Trading time for memory was introduced by Chen et al. (2016); the selection follows MindFormers. Precedence: an excluded
operator is saved even inside a fully recomputed layer, and full recomputation wins over selected operators.

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
from mindllm.parallel.operators import cell_operators, operators

logger = logging.getLogger(__name__)

# Attributes the compiler reads. (Primitive.recompute() can be called only once: the attribute then hides the method.)
OPERATOR = "recompute"
COMMUNICATION = "recompute_comm_op"  # also repeat the communication that the compiler inserts next to the operator
Cells = Sequence[tuple[nn.Cell, LayerAssignment]]
IN_ORDER = ("select_recompute", "select_comm_recompute", "select_recompute_exclude", "select_comm_recompute_exclude")


@dataclass(frozen=True)
class Match:
    """A match of a pattern in a layer: an operator or a cell, at a dotted path."""

    path: str
    target: Primitive | nn.Cell

    @property
    def is_operator(self) -> bool:
        return isinstance(self.target, Primitive)


def match(layer: nn.Cell, pattern: str) -> list[Match]:
    """Return everything in ``layer`` that ``pattern`` names."""
    return [item for form in pattern_forms(pattern) for item in _match(layer, form.split(LEVEL_SEPARATOR), "")]


def match_some(layer: nn.Cell, pattern: str, operators_only: bool) -> list[Match]:
    """Return the matches of ``pattern``, only operators where an operator is required.

    Raises:
        ValueError: nothing matches, or only cells where an operator is required; names the nearest path.
    """
    matches = match(layer, pattern)
    if operators_only and any(item.is_operator for item in matches):
        return [item for item in matches if item.is_operator]
    if matches and not operators_only:
        return matches
    reason = "names a cell, not an operator" if matches else "matches no operator of a layer"
    candidates = [path.replace(".", LEVEL_SEPARATOR) for path in operators(layer)]
    below = [path for path in candidates if matches and path.startswith(matches[0].path.replace(".", LEVEL_SEPARATOR))]
    raise ValueError(f"pattern '{pattern}' {reason}{nearest(pattern, below or candidates)}")


def _match(cell: nn.Cell, levels: list[str], path: str) -> Iterator[Match]:
    level, *rest = levels
    cells = {name: child for name, child in cell.name_cells().items() if re.fullmatch(level, name)}
    if rest:
        for name, child in cells.items():
            yield from _match(child, rest, f"{path}{name}.")
        return
    for name, operator in cell_operators(cell).items():
        if re.fullmatch(level, name):
            yield Match(path + name, operator)
    for name, child in cells.items():
        yield Match(path + name, child)


def apply_recompute(layers: Sequence[nn.Cell], plan: LayerPlan, config: RunConfig) -> None:
    """Mark ``layers`` (one cell per layer of the plan).

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
    """Save the keys and values that a piece of a sequence attends to. When the piece is recomputed, later pieces have changed
    their inputs.
    """
    for cell in layer.cells():
        for child in cell.cells():
            if isinstance(child, EarlierPieces):
                for operator in cell_operators(child).values():
                    operator.add_prim_attr(OPERATOR, False)


def _recompute_layer(layer: nn.Cell, options: RecomputeConfig) -> None:
    keywords = {}
    if options.recompute_slice_activation:
        keywords["recompute_slice_activation"] = True
    layer.recompute(mp_comm_recompute=options.mp_comm_recompute, **keywords)


def _select(layer: nn.Cell, number: int, assignment: LayerAssignment, cells: Cells, config: RunConfig) -> None:
    """Select the operators of patterns, then deselect those of excluded ones.

    A pattern may match in some of its layers only. One of the patterns that plain counts select need not match at all, as long as
    another one does: a feed-forward without a gate has no multiplication.
    """
    for key in IN_ORDER:
        touched = []
        for pattern in assignment.applied(key):
            if match(layer, pattern) or not (
                assignment.is_default(key)
                or any(match(cell, pattern) for cell, planned in cells if pattern in planned.applied(key))
            ):
                touched += _apply_pattern(layer, key, pattern, config)
        if touched:
            kind = "comm recompute" if "comm" in key else "recompute"
            action = "exclude" if key.endswith("exclude") else "on"
            logger.info("Set select %s %s at layer %d: %s", kind, action, number, ", ".join(touched))


def _apply_pattern(layer: nn.Cell, key: str, pattern: str, config: RunConfig) -> list[str]:
    """Mark the matches of one pattern and return their paths."""
    communication, on = "comm" in key, not key.endswith("exclude")
    try:
        matches = match_some(layer, pattern, operators_only=communication or not on)
    except ValueError as error:
        raise config.error(f"recompute_config.{key}", str(error)) from None
    for item in matches:
        if isinstance(item.target, Primitive):
            item.target.add_prim_attr(COMMUNICATION if communication else OPERATOR, on)
        else:
            item.target.recompute()
    return [item.path for item in matches]
