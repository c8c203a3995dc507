"""Whether results that are to wait on the host for the backward pass are marked for it, and moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mindllm.compiled.conformance.expected import swapped
from mindllm.compiled.conformance.finding import Finding, Mistake, numbers_text, together
from mindllm.compiled.graph.compiled_graph import IN_LENGTHS, Node
from mindllm.compiled.graph.operators import Operators, is_flagged
from mindllm.config import RunConfig
from mindllm.config.recompute import names_operator

MARK, PREFETCH, MOVE = "offload", "backward_prefetch", "MoveTo"


def swaps(config: RunConfig, ranks: Sequence[Operators]) -> Finding | None:
    """In each layer the operators that are named are marked, with the operators that pass while a result comes back, no others
    are, and something is moved where one is marked.
    """
    mistakes: list[Mistake] = []
    asked, found = set(), set()
    for rank in ranks:
        declared, moved = _by_layer(rank)
        for number, operators in sorted(declared.items()):
            wanted = _wanted(swapped(config, number), operators)
            asked |= {number} if wanted else set()
            found |= {number} if moved[number] else set()
            mistakes += [
                Mistake(rank.graph.rank, f"layer {number} {text}")
                for text in _mistakes(wanted, operators, moved[number])
            ]
    if not (asked or found or mistakes):
        return None
    return Finding(
        "swap", f"layers {numbers_text(list(asked))}", f"layers {numbers_text(list(found))}", together(mistakes)
    )


def _by_layer(rank: Operators) -> tuple[dict[int, list[tuple[Node, str]]], dict[int, int]]:
    """Operators that the model declares with their path inside the layer, and how many results are moved away."""
    declared: dict[int, list[tuple[Node, str]]] = defaultdict(list)
    moved: dict[int, int] = defaultdict(int)
    for node, layer, place in rank.forward_in_layers:
        if node.op == MOVE and not any(user.op == IN_LENGTHS for user in rank.consumers(node)):
            moved[layer] += 1
        elif node.input_strategy is not None:
            declared[layer].append((node, ".".join(filter(None, (place, node.instance)))))
    return declared, moved


def _wanted(patterns: Mapping[str, int], operators: list[tuple[Node, str]]) -> dict[str, int]:
    """By path of an operator the operators that pass while its result comes back; what is computed again is not kept."""
    return {
        path: ahead
        for pattern, ahead in patterns.items()
        for node, path in operators
        if (not pattern or names_operator(pattern, path)) and not is_flagged(node)
    }


def _mistakes(wanted: Mapping[str, int], operators: list[tuple[Node, str]], moved: int) -> Iterator[str]:
    marked = {path: node.attributes.get(PREFETCH) for node, path in operators if node.attributes.get(MARK)}
    if missing := sorted(set(wanted) - set(marked)):
        yield f"keeps {', '.join(missing)} on the device"
    if more := sorted(set(marked) - set(wanted)):
        yield f"moves {', '.join(more)}, which nobody asked for"
    for path in sorted(set(wanted) & set(marked)):
        if marked[path] != wanted[path]:
            yield f"has {path} back {marked[path]} operators ahead, not {wanted[path]}"
    if bool(moved) != bool(marked):
        yield f"has {moved} results moved, and {len(marked)} operators marked"
