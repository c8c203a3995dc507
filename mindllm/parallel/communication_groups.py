"""Groups of ranks that a model makes itself, beside those the compiler makes, and the operators that exchange in them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from mindspore.communication import create_group
from mindspore.ops import Primitive

from mindllm.parallel.layout import RANKS_OF_GROUP

_made: set[str] = set()


def group_of(ranks: Sequence[int]) -> str:
    """Name of the group of these ranks, the own one among them; made at first use."""
    numbers = ",".join(map(str, ranks))
    name = f"{len(ranks)}-own-{zlib.crc32(numbers.encode())}"  # names begin with the size, as those the compiler makes
    if name not in _made:
        create_group(name, list(ranks))
        _made.add(name)
    return name


def mark_ranks(operator: Primitive, ranks: Sequence[int]) -> None:
    """Writes the ranks of its group onto an operator, for whoever reads the compiled graph."""
    operator.add_prim_attr(RANKS_OF_GROUP, list(ranks))


def in_group(kind: type[Primitive], ranks: Sequence[int]) -> Primitive:
    """An operator of this kind that exchanges with these ranks, the own one among them."""
    operator = kind(group=group_of(ranks))
    mark_ranks(operator, ranks)
    return operator
