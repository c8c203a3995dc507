"""Marks of the compiler on layers that take their rows in parts (``models/interleaved_layer.py``), as MindFormers sets them.

``skip_redistribution``: each device cuts and joins the rows it has. ``fine_grained_interleaved_index``: between which cuts and
which join the compiler orders two parts, so that one exchanges while the other computes. Joins need numbers of their own: of two
with one number it makes one block, whose order goes round in a circle ("Graph cycle exists").
"""

from __future__ import annotations

from mindllm.models import CausalLM
from mindllm.models.fine_grain_interleave import FineGrainInterleavedLayer

ON_ITS_OWN_ROWS = "skip_redistribution"
BLOCK = "fine_grained_interleaved_index"


def mark_row_parts(lm: CausalLM) -> None:
    """Marks cuts and joins of all layers that have them."""
    for number, layer in enumerate(lm.model.layers):
        if not isinstance(layer, FineGrainInterleavedLayer):
            continue
        cuts = [part.slice for part in (*layer.behind, *(layer.beside if layer.first else ()))]
        for cut in cuts:
            cut.add_prim_attr(BLOCK, number)
        joins = [] if layer.first else [layer.join_query, layer.join_key, layer.join_value]
        if joins:
            layer.join_query.add_prim_attr(BLOCK, number)
        if layer.last:
            joins.append(layer.join)  # behind it rows are gathered: as the end of a block it would wait for itself
        for operator in (*joins, *cuts):
            operator.add_prim_attr(ON_ITS_OWN_ROWS, True)
