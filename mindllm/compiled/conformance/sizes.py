"""Whether rows of hidden states, parts of weights and exchanged sums have the sizes that the YAML's numbers give.

The sharding table, which the compiler is given, is not asked (``shardings.py`` holds the graphs against that).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mindllm.architecture.optimizer_state import updated_weights
from mindllm.compiled.conformance.expected import Rows, neighbours, part_of_weight, rows_of_rank
from mindllm.compiled.conformance.finding import Finding, Mistake, together
from mindllm.compiled.graph.compiled_graph import Node
from mindllm.compiled.graph.operators import FORWARD, REFERENCE, Operators, layer_of
from mindllm.config import RunConfig

NORMS = ("attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm", "norm_out")
"""Cells between the parts of a layer, and behind the last one: each reads or makes hidden states."""
INTO, OUT_OF = ("attention.wq", "feed_forward.w1"), ("attention.wo", "feed_forward.w2")
"""Projections with which the parts of a layer begin and end."""
SUMS, GATHER = ("AllReduce", "ReduceScatter"), "AllGather"


def sizes(config: RunConfig, ranks: Sequence[Operators]) -> Finding | None:
    """Rows of hidden states and of products, parts of weights, and the sums behind the products that end the parts of a layer."""
    if config.parallel_config.stage_device_num == 1:
        return None
    rows = rows_of_rank(config)
    mistakes = [
        Mistake(rank.graph.rank, text)
        for rank in ranks
        for text in (*_weights(config, rank), *_rows(config, rank, rows), *_sums(config, rank, rows))
    ]
    asked = f"{rows.between} rows of hidden states"
    found = f"{len(mistakes)} otherwise" if mistakes else asked
    return Finding("sizes", asked, found, together(mistakes))


def _weights(config: RunConfig, rank: Operators) -> Iterator[str]:
    """Trained weights whose part on the rank, before an optimizer cuts it, is another one."""
    for name in updated_weights(rank.graph.parameters):
        weight = rank.graph.parameters.get(name)
        if weight is None or weight.layout is None:
            continue
        wanted = part_of_weight(config, name, weight.layout.full_shape)
        if wanted is not None and weight.layout.slice_shape != wanted:
            yield f"{name} is cut to {list(weight.layout.slice_shape)}, not to {list(wanted)}"


def _rows(config: RunConfig, rank: Operators, rows: Rows) -> Iterator[str]:
    """Norms, and products that begin or end a part of a layer, of other rows."""
    parts = {1, config.model.config.fine_grain_interleave}  # of the rows, one after another
    for node in rank.nodes:
        place = rank.place(node)
        if rank.phase(node) != FORWARD or place.startswith(REFERENCE) or not node.shapes:
            continue
        cell = place.rpartition(".")[2]
        if node.instance == "norm" and cell in NORMS:
            wanted = rows.between
        elif node.instance == "matmul" and place.endswith((*INTO, *OUT_OF)):
            wanted = rows.inside
        else:
            continue
        found = math.prod(node.shapes[0][:-1])
        if found not in {wanted // part for part in parts}:
            yield f"{place} is of {found} rows, not {wanted}"


def _sums(config: RunConfig, rank: Operators, rows: Rows) -> Iterator[str]:
    """Products that end a part of a layer, and whose sum over tensor-parallel ranks is another one."""
    own, hidden = neighbours(config, rank.graph.rank), config.model.config.hidden_size
    if len(own) == 1:
        return
    wanted = "ReduceScatter" if config.parallel_config.use_seq_parallel else "AllReduce"
    parts = {1, config.model.config.fine_grain_interleave}
    shapes = {(rows.between // part, hidden) for part in parts}
    for place, nodes in sorted(_exchanges(rank, own).items()):
        sums = [node for node in nodes if node.op in SUMS]
        found = {(node.op, node.shapes[0]) for node in sums}
        if any(op != wanted or shape not in shapes for op, shape in found) or not found:
            texts = " and ".join(f"{op} of {list(shape)}" for op, shape in sorted(found)) or "nothing"
            yield f"behind {place} stands {texts}, not {wanted} of {[rows.between, hidden]}"


def _exchanges(rank: Operators, own: tuple[int, ...]) -> dict[str, list[Node]]:
    """By projection that ends a part of a layer: what the forward pass exchanges over ``own`` ranks there."""
    found: dict[str, list[Node]] = defaultdict(list)
    for node in rank.nodes:
        place = rank.place(node)
        if rank.phase(node) != FORWARD or place.startswith(REFERENCE) or not layer_of(place):
            continue
        if place.endswith(OUT_OF) and node.instance == "matmul":
            found[place] += []
        if place.endswith(OUT_OF) and node.ranks == own:
            found[place].append(node)
    return found
