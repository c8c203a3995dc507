"""Whether rows of hidden states, parts of weights and exchanged sums have the sizes that the YAML's numbers give.

The sharding table, which the compiler is given, is not asked (``shardings.py`` holds the graphs against that).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mindllm.architecture.optimizer_state import is_state
from mindllm.compiled.conformance.expected import (
    Rows,
    exchanged_with_experts,
    gathered_elements,
    neighbours,
    part_of_weight,
    rows_of_head,
    rows_of_rank,
    runs_of_a_layer,
)
from mindllm.compiled.conformance.finding import Finding, Mistake, numbers_text, together
from mindllm.compiled.conformance.placement import SENT, messages
from mindllm.compiled.execute.state import ACCUMULATORS
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, IN_LENGTHS, Node
from mindllm.compiled.graph.operators import FORWARD, REFERENCE, Operators, layer_of
from mindllm.config import RunConfig
from mindllm.parallel.layout import mesh_of

NORMS = ("attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm", "norm_out")
"""Cells between the parts of a layer, and behind the last one: each reads or makes hidden states."""
HEAD, ATTENTION = "lm_head", "attention"
INTO, OUT_OF = ("attention.wq", "feed_forward.w1"), ("attention.wo", "feed_forward.w2")
"""Projections with which the parts of a layer begin and end."""
SUMS, GATHER, EXCHANGE = ("AllReduce", "ReduceScatter"), "AllGather", "AlltoAll"
OF_EXPERTS = "feed_forward.experts"
PROJECTION = re.compile(r"(attention|feed_forward|feed_forward\.shared)\.w\w+(\.|$)")
"""Cells in layers in whose place a rank exchanges, whatever it shares: what comes out of a projection, or goes into it."""
BEGINS = re.compile(r"(attention|feed_forward|feed_forward\.shared)\.(?:w[13qkv]|w[qk]v?_\w+)(?:\.|$)")
"""Projections of hidden states, behind the part of a layer that begins with them."""


def sizes(config: RunConfig, ranks: Sequence[Operators]) -> Finding | None:
    """Rows of hidden states and of products, parts of weights, and the sums behind the products that end the parts of a layer."""
    if config.parallel_config.stage_device_num == 1:
        return None
    rows = rows_of_rank(config)
    mistakes = [
        Mistake(rank.graph.rank, text)
        for rank in ranks
        for text in (
            *_weights(config, rank),
            *_rows(config, rank, rows),
            *_sums(config, rank, rows),
            *_gathers(config, rank),
            *_messages(config, rank, rows),
            *_needless(config, rank),
            *_exchanges_of_experts(config, rank),
            *_sent_tokens(config, rank),
        )
    ]
    asked = f"{rows.between} rows of hidden states"
    found = f"{len(mistakes)} otherwise" if mistakes else asked
    return Finding("sizes", asked, found, together(mistakes))


def _weights(config: RunConfig, rank: Operators) -> Iterator[str]:
    """Weights, trained or not, whose part on the rank, before an optimizer cuts it, is another one."""
    for name, weight in rank.graph.parameters.items():
        if weight.layout is None or is_state(name) or name.startswith(ACCUMULATORS):
            continue
        expected = part_of_weight(config, name, weight.layout.full_shape)
        if expected is not None and weight.layout.slice_shape != expected:
            yield f"{name} is cut to {list(weight.layout.slice_shape)}, not to {list(expected)}"


def _rows(config: RunConfig, rank: Operators, rows: Rows) -> Iterator[str]:
    """Norms, and products that begin or end a part of a layer, of other rows.

    Feed-forwards take them in the parts of ``fine_grain_interleave``, one after another; around attention some are whole.
    """
    parts = config.model.config.fine_grain_interleave
    for node in rank.nodes:
        place = rank.place(node)
        if rank.phase(node) != FORWARD or place.startswith(REFERENCE) or not node.shapes:
            continue
        cell = place.rpartition(".")[2]
        if node.instance == "norm" and cell in NORMS:
            expected = {rows.between, rows.between // parts}
        elif node.instance == "matmul" and place.endswith((*INTO, *OUT_OF)):
            expected = {rows.inside // parts} | ({rows.inside} if ATTENTION in place.split(".") else set())
        elif node.instance == "matmul" and cell == HEAD:
            expected = {rows_of_head(config)}
        else:
            continue
        found = math.prod(node.shapes[0][:-1])
        if found not in expected:
            yield f"{place} is of {found} rows, not {max(expected)}"


def _sums(config: RunConfig, rank: Operators, rows: Rows) -> Iterator[str]:
    """Yield products that end a part of a layer, and whose sum over tensor-parallel ranks is another one."""
    own, hidden = neighbours(config, rank.graph.rank), config.model.config.hidden_size
    if len(own) == 1:
        return
    expected = "ReduceScatter" if config.parallel_config.use_seq_parallel else "AllReduce"
    parts = {1, config.model.config.fine_grain_interleave}
    shapes = {(rows.between // part, hidden) for part in parts}
    for place, nodes in sorted(_exchanges(rank, own).items()):
        sums = [node for node in nodes if node.op in SUMS]
        found = {(node.op, node.shapes[0]) for node in sums}
        if any(op != expected or shape not in shapes for op, shape in found) or not found:
            texts = " and ".join(f"{op} of {list(shape)}" for op, shape in sorted(found)) or "nothing"
            yield f"behind {place} stands {texts}, not {expected} of {[rows.between, hidden]}"


def _gathers(config: RunConfig, rank: Operators) -> Iterator[str]:
    """Yield parts of layers that put together more or less of the hidden states than all of them, once.

    Rows in parts one after another (``fine_grain_interleave``) lose their cells here, and are left out.
    """
    own = neighbours(config, rank.graph.rank)
    if len(own) == 1 or config.model.config.fine_grain_interleave > 1:
        return
    found: dict[tuple[int, str], int] = defaultdict(int)
    for node, layer, place in rank.forward_in_layers:
        if not (begins := BEGINS.match(place)):
            continue
        part = begins.group(1)
        if node.instance == "matmul":
            found[layer, part] += 0
        if node.op == GATHER and node.ranks == own and not rank.parameter(node.inputs[0]):
            found[layer, part] += math.prod(node.shapes[0]) * rank.times(node)
    expected = gathered_elements(config) * runs_of_a_layer(config)
    for (layer, part), elements in sorted(found.items()):
        if elements != expected:
            yield f"before the products of {part} in layer {layer} {elements} elements are gathered in a step, not {expected}"


def _messages(config: RunConfig, rank: Operators, rows: Rows) -> Iterator[str]:
    """Hidden states that go from stage to stage, those of both models of pairs together, in other rows than layers have them."""
    hidden = config.model.config.hidden_size
    for node in messages(rank):
        shape = node.shapes[0]
        if len(shape) == 2 and shape[1] in (hidden, 2 * hidden) and shape[0] != rows.between:
            yield f"{node.op} is of {list(shape)}, not of {rows.between} rows"


def _needless(config: RunConfig, rank: Operators) -> Iterator[str]:
    """Exchanges in layers where nothing has to be exchanged: it is at projections, with experts in the whole feed-forward, and
    where ranks share sequences in the whole of attention. Weights that the optimizer cut are gathered anywhere.

    Rows in parts one after another (``fine_grain_interleave``) lose their cells here, and are left out.
    """
    model = config.model.config
    if model.fine_grain_interleave > 1:
        return
    parts = (ATTENTION,) * (config.parallel_config.context_parallel > 1) + ("feed_forward",) * (model.expert_num > 1)
    for node, layer, place in rank.forward_in_layers:
        if node.op not in COLLECTIVES - {*SENT} or len(node.ranks or ()) < 2 or rank.parameter(node.inputs[0]):
            continue
        if not PROJECTION.match(place) and not place.startswith(parts):
            shape = list(node.shapes[0])
            yield f"{node.op} of {shape} stands at {place or 'the end'} of layer {layer}, where nothing is to be exchanged"


def _exchanges_of_experts(config: RunConfig, rank: Operators) -> Iterator[str]:
    """Layers that exchange more or less with their experts than what these have places for, there and back."""
    once = exchanged_with_experts(config)
    if once is None:
        return
    found: dict[int, int] = defaultdict(int)
    for node, layer, place in rank.forward_in_layers:
        if place.startswith(OF_EXPERTS):
            found[layer] += 0
        if node.op == EXCHANGE and place.startswith("feed_forward"):
            found[layer] += math.prod(node.shapes[0]) * rank.times(node)
    expected = 2 * once * runs_of_a_layer(config)
    for layer, elements in sorted(found.items()):
        if elements != expected:
            yield f"layer {layer} exchanges {elements} elements with its experts in a step, not {expected}"


def _sent_tokens(config: RunConfig, rank: Operators) -> Iterator[str]:
    """Layers whose sorted tokens do not go to the ranks of their experts and back, each once, or not to those ranks.

    How many arrive is known when the step runs; the numbers of their experts go with them, and nothing comes back for these.
    """
    model, mesh = config.model.config, mesh_of(config)
    if not model.moe_grouped_gemm or mesh.expert_parallel == 1:
        return
    own, width = mesh.expert_ranks(rank.graph.rank), model.hidden_size
    found: dict[int, list[int]] = defaultdict(list)
    for node, layer, place in rank.forward_in_layers:
        if place.startswith(OF_EXPERTS):
            found[layer] += []
        if place.startswith(OF_EXPERTS) and node.op == IN_LENGTHS:
            found[layer] += [int(node.attributes["block_size"])] * rank.times(node)
            if node.ranks != own:
                yield f"layer {layer} sends tokens over ranks {numbers_text(node.ranks)}, experts are on {numbers_text(own)}"
    expected = sorted([1, width, width] * runs_of_a_layer(config) * config.sends_tokens)
    for layer, blocks in sorted(found.items()):
        if sorted(blocks) != expected:
            texts = [", ".join(map(str, sorted(lengths))) or "nothing" for lengths in (blocks, expected)]
            yield f"layer {layer} sends blocks of {texts[0]} elements to its experts in a step and back, not {texts[1]}"


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
