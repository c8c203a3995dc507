"""Whether ranks that share a sequence exchange what they should in every layer, and each attends from its part alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mindllm import axes
from mindllm.compiled.conformance.finding import Finding, Mistake, together
from mindllm.compiled.conformance.placement import QUERIES, attention_scores, forward_operators, positions_of_rank
from mindllm.compiled.graph.compiled_graph import Node
from mindllm.compiled.graph.operators import Operators
from mindllm.config import RunConfig
from mindllm.parallel.layout import CONTEXT, Mesh

GATHERED, EXCHANGED = "AllGather", "AlltoAll"
WORDS = {GATHERED: "keys and values gathered", EXCHANGED: "heads for the sequence"}


def sequences(config: RunConfig, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """Attention of every layer exchanges over the ranks of a sequence as asked for, and has its part of the scores."""
    sizes = config.parallel_config
    if not sizes.shares_sequences:
        return None
    wanted = EXCHANGED if sizes.exchanges_heads else GATHERED
    mistakes, found = [], set()
    sharing = sizes.size(axes.CONTEXT)
    pieces = 2 if sizes.context_parallel_balanced else 1  # one of each half, one after the other
    rows = positions_of_rank(config) // pieces
    for rank in ranks:
        own = mesh.ranks_along(CONTEXT, rank.graph.rank)
        exchanges, scores = _by_layer(rank, own)
        for layer in sorted(scores):
            kinds = {node.op for node in exchanges[layer]}
            found |= kinds
            if wanted not in kinds:
                text = f"attention of layer {layer} has no {wanted} over ranks of its sequence"
                mistakes.append(Mistake(rank.graph.rank, text))
            for node in scores[layer]:
                if node.shapes[0][QUERIES] != rows:
                    text = (
                        f"attention of layer {layer} is over {node.shapes[0][QUERIES]} positions of queries, not {rows}"
                    )
                    mistakes.append(Mistake(rank.graph.rank, text))
    return Finding("sequences", _text({wanted}, sharing), _text(found, sharing), together(mistakes))


def _by_layer(rank: Operators, own: tuple[int, ...]) -> tuple[dict[int, list[Node]], dict[int, list[Node]]]:
    """What each layer exchanges over ``own`` ranks for its attention, and what makes its scores."""
    exchanges: dict[int, list[Node]] = defaultdict(list)
    scores: dict[int, list[Node]] = defaultdict(list)
    for node, layer, place in forward_operators(rank):
        if node.op in WORDS and node.ranks == own and place.startswith("attention"):
            exchanges[layer].append(node)
    for node, layer in attention_scores(rank):
        scores[layer].append(node)
    return exchanges, scores


def _text(kinds: set[str], ranks: int) -> str:
    words = " and ".join(words for kind, words in WORDS.items() if kind in kinds)
    return f"{words or 'nothing exchanged'} over {ranks} ranks"
