"""Whether ranks exchange what they should.

All ranks send the gradients of the same weights in one message, those the YAML puts together.

Ranks that share a sequence exchange what they should in every layer, and each attends from its part alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from mindllm import axes
from mindllm.compiled.conformance.expected import (
    gathers_again,
    message_of_layer,
    message_of_others,
    runs_of_a_layer,
)
from mindllm.compiled.conformance.finding import Finding, Mistake, numbers_text, together
from mindllm.compiled.conformance.placement import (
    QUERIES,
    attention_scores,
    pieces_of_rank,
    positions_of_rank,
)
from mindllm.compiled.graph.compiled_graph import IN_LENGTHS, Node
from mindllm.compiled.graph.operators import BACKWARD, Operators, layer_of
from mindllm.config import RunConfig
from mindllm.parallel.layout import CONTEXT, Mesh

FUSION = "fusion"
REDUCTIONS = ("AllReduce", "ReduceScatter")
UNFUSED = 0  # MindSpore does not put gradients together where weights are sharded between their uses
REUSED = "CR_"  # begins names of weights inside networks that are compiled once for all parts of a batch
GATHERED, EXCHANGED, PASSED = "AllGather", "AlltoAll", IN_LENGTHS
WORDS = {
    GATHERED: "keys and values gathered",
    EXCHANGED: "heads for the sequence",
    PASSED: "keys and values passed on",
}


def gradient_fusion(config: RunConfig, ranks: Sequence[Operators]) -> Finding | None:
    """Compare the message number of each weight's gradient with the YAML's, and between the ranks of its group."""
    found = {rank.graph.rank: _messages(rank) for rank in ranks}
    if not any(found.values()):
        return None
    mistakes = []
    for rank, messages in found.items():
        for weight, (number, members) in messages.items():
            where = layer_of(weight)
            expected = message_of_layer(config, where[0]) if where else message_of_others(config)
            if number != expected and not (number == UNFUSED and gathers_again(config)):
                mistakes.append(Mistake(rank, f"the gradient of {weight} is in message {number}, not {expected}"))
            others = {found[member].get(weight, (None,))[0] for member in members if member in found}
            if others != {number}:
                text = f"the gradient of {weight} is in different messages on ranks {numbers_text(members)}"
                mistakes.append(Mistake(rank, text))
    numbers = {number for messages in found.values() for number, _ in messages.values()}
    wanted_numbers = {message_of_layer(config, layer) for layer in range(config.model.config.layer_count)}
    wanted_numbers.add(message_of_others(config))
    asked = f"{_count(wanted_numbers)}, the same on all ranks"
    return Finding("gradient fusion", asked, _count(numbers), together(mistakes))


def _count(numbers: Collection[int]) -> str:
    return f"{len(numbers)} message{'s' * (len(numbers) != 1)}"


def _messages(rank: Operators) -> dict[str, tuple[int, tuple[int, ...]]]:
    """By weight the number of the message its gradient is exchanged in, and the ranks of the exchange."""
    return {
        weight: (int(node.attributes.get(FUSION, 0)), node.ranks) for weight, node in exchanged_gradients(rank).items()
    }


def exchanged_gradients(rank: Operators) -> dict[str, Node]:
    """Return by weight the operator that exchanges its gradient."""
    return {
        rank.weight(node).removeprefix(REUSED): node
        for node in rank.nodes
        if node.op in REDUCTIONS and rank.phase(node) == BACKWARD and _is_of_a_weight(node)
    }


def _is_of_a_weight(node: Node) -> bool:
    return "mirror_user_id" in node.attributes or "mirror_user_id" in node.primal


def sequences(config: RunConfig, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """Attention of every layer exchanges over the ranks of a sequence as asked for, and has its part of the scores."""
    sizes = config.parallel_config
    if not sizes.shares_sequences:
        return None
    expected = EXCHANGED if sizes.exchanges_heads else PASSED if sizes.passes_keys else GATHERED
    mistakes, found = [], set()
    sharing = sizes.size(axes.CONTEXT)
    rows = positions_of_rank(config) // pieces_of_rank(config)
    passed = (sharing - 1) * runs_of_a_layer(config)
    for rank in ranks:
        own = mesh.ranks_along(CONTEXT, rank.graph.rank)
        exchanges, scores = _by_layer(rank, own)
        for layer in sorted(scores):
            kinds = {node.op for node in exchanges[layer]}
            found |= kinds & {expected} or kinds  # others may come from changes of layout
            if expected not in kinds:
                text = f"attention of layer {layer} has no {expected} over ranks of its sequence"
                mistakes.append(Mistake(rank.graph.rank, text))
            times = sum(rank.times(node) for node in exchanges[layer] if node.op == PASSED)
            if sizes.passes_keys and times != passed:
                text = f"attention of layer {layer} passes keys and values on {times} times in a step, not {passed}"
                mistakes.append(Mistake(rank.graph.rank, text))
            for node in scores[layer]:
                if node.shapes[0][QUERIES] != rows:
                    text = (
                        f"attention of layer {layer} is over {node.shapes[0][QUERIES]} positions of queries, not {rows}"
                    )
                    mistakes.append(Mistake(rank.graph.rank, text))
    return Finding("sequences", _text({expected}, sharing), _text(found, sharing), together(mistakes))


def _by_layer(rank: Operators, own: tuple[int, ...]) -> tuple[dict[int, list[Node]], dict[int, list[Node]]]:
    """Return, by layer, the exchanges of attention over the ranks ``own``, and the operators of its scores."""
    exchanges: dict[int, list[Node]] = defaultdict(list)
    scores: dict[int, list[Node]] = defaultdict(list)
    for node, layer, place in rank.forward_in_layers:
        if node.op in WORDS and node.ranks == own and place.startswith("attention"):
            exchanges[layer].append(node)
    for node, layer in attention_scores(rank):
        scores[layer].append(node)
    return exchanges, scores


def _text(kinds: set[str], ranks: int) -> str:
    words = " and ".join(words for kind, words in WORDS.items() if kind in kinds)
    return f"{words or 'nothing exchanged'} over {ranks} ranks"
