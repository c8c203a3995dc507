"""Whether the layers that the plan recomputes, and no others, are marked for it, and whether the marks have an effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mindllm.compiled.conformance.expected import (
    COMMUNICATION,
    EXCLUDE,
    EXCLUDED_COMMUNICATION,
    SELECT,
    AskedLayer,
    AskedPlan,
    swapped,
)
from mindllm.compiled.conformance.finding import Finding, Mistake, numbers_text, together
from mindllm.compiled.graph.compiled_graph import IN_LENGTHS, Node
from mindllm.compiled.graph.operators import RECOMPUTED, Operators, is_flagged, layer_of
from mindllm.config import RunConfig
from mindllm.config.recompute import RecomputeConfig, names_operator

COMMUNICATION_MARK, SLICE_MARK = "recompute_comm_op", "slice_activation"
DROPOUT, OF_MASK = "dropout", ("bits", "compare", "cast")
OF_CODES = "held"  # the cell whose operators make a matrix out of codes, and are marked in any plan
OF_EARLIER_PIECES = ("key_cache", "value_cache")  # what pieces of a sequence attend to changes, and is kept in any plan


def is_of_mask(path: Sequence[str]) -> bool:
    """Return True if an operator makes the mask of a dropout, which every plan draws again for the gradient."""
    return path[-1] in OF_MASK and any(DROPOUT in part for part in path)


def recomputation(config: RunConfig, plan: AskedPlan, ranks: Sequence[Operators]) -> Finding:
    """Layers that are recomputed as a whole, operators that are selected, and operators that are excluded."""
    mistakes: list[Mistake] = []
    whole: set[int] = set()
    some: set[int] = set()
    for rank in ranks:
        layers = _by_layer(rank)
        repeated = _repeated(rank)
        for number, operators in sorted(layers.items()):
            reader = _Layer(plan.layers[number], config.recompute_config, operators, repeated[number])
            mistakes += [Mistake(rank.graph.rank, f"layer {number} {text}") for text in reader.mistakes()]
            (whole if reader.is_whole else some if reader.flagged else set()).add(number)
    asked = (
        {number for number, layer in enumerate(plan.layers) if layer.recompute},
        {number for number, layer in enumerate(plan.layers) if not layer.recompute and layer.applied(SELECT)},
    )
    return Finding("recomputation", _text(*asked), _text(whole, some), together(mistakes))


class _Layer:
    """One layer on one rank: its declared operators in the forward pass, and how many are repeated for the backward pass."""

    def __init__(
        self, asked: AskedLayer, options: RecomputeConfig, operators: list[tuple[Node, str]], repeated: int
    ) -> None:
        self.asked, self.options, self.operators, self.repeated = asked, options, operators, repeated
        self.flagged = [path for node, path in operators if is_flagged(node) and not self._is_always(path)]

    def _is_always(self, path: str) -> bool:
        """Return True if the operator is marked in every plan."""
        asked = self.asked.recompute or any(names_operator(pattern, path) for pattern in self.asked.applied(SELECT))
        parts = path.split(".")
        return (OF_CODES in parts or is_of_mask(parts)) and not asked

    @property
    def is_whole(self) -> bool:
        """Whether all of its operators are marked but those the plan excludes."""
        kept = [path for _, path in self.operators if path not in self.flagged]
        return all(self._is_excluded(path) for path in kept) and bool(self.flagged)

    def mistakes(self) -> Iterator[str]:
        if self.asked.recompute:
            yield from self._of_whole()
        else:
            yield from self._of_selected()
        yield from self._of_communication()

    def _of_whole(self) -> Iterator[str]:
        if not self.flagged:
            yield "is not recomputed"
        elif not self.is_whole:
            kept = sorted({p for _, p in self.operators if p not in self.flagged and not self._is_excluded(p)})
            yield f"does not recompute {', '.join(kept)}"
        elif not self.repeated:
            yield "is marked, and the compiler repeats none of its operators"
        if wrong := sorted({path for path in self.flagged if self._is_excluded(path)}):
            yield f"recomputes {', '.join(wrong)}, which the plan excludes"

    def _of_selected(self) -> Iterator[str]:
        selected = self.asked.applied(SELECT)
        found = {pattern: [path for _, path in self.operators if names_operator(pattern, path)] for pattern in selected}
        one_is_enough = self.asked.is_default(SELECT) and any(found.values())
        for pattern, matched in found.items():
            missing = not matched and not one_is_enough
            if missing or any(p not in self.flagged and not self._is_excluded(p) for p in matched):
                yield f"does not recompute '{pattern}'"
        wrong = [path for path in self.flagged if not any(names_operator(pattern, path) for pattern in selected)]
        if wrong and len(wrong) == len(self.operators):
            yield "is recomputed, which nobody asked for"
        elif wrong:
            yield f"recomputes {', '.join(sorted(set(wrong)))}, which nobody asked for"

    def _of_communication(self) -> Iterator[str]:
        """Exchanges beside selected operators are repeated, in a whole layer beside all, and nowhere beside excluded ones."""
        for pattern in self.asked.applied(COMMUNICATION):
            if not any(names_operator(pattern, path) for _, path in self.operators):
                yield f"does not repeat the communication beside '{pattern}'"
        for mark, asked, verb in (
            (COMMUNICATION_MARK, self._repeats_communication, "communication beside"),
            (SLICE_MARK, self._slices, "slice of"),
        ):
            marked = {path for node, path in self.operators if node.attributes.get(mark)}
            expected = {path for _, path in self.operators if asked(path)}
            if missing := sorted(expected - marked):
                yield f"does not repeat the {verb} {', '.join(missing)}"
            if more := sorted(marked - expected):
                yield f"repeats the {verb} {', '.join(more)}, which nobody asked for"

    def _repeats_communication(self, path: str) -> bool:
        if any(names_operator(pattern, path) for pattern in self.asked.applied(EXCLUDED_COMMUNICATION)):
            return False
        named = any(names_operator(pattern, path) for pattern in self.asked.applied(COMMUNICATION))
        return named or (self.asked.recompute and self.options.mp_comm_recompute)

    def _slices(self, path: str) -> bool:
        return self.asked.recompute and self.options.recompute_slice_activation

    def _is_excluded(self, path: str) -> bool:
        is_kept = not {*path.split(".")}.isdisjoint(OF_EARLIER_PIECES)
        return is_kept or any(names_operator(pattern, path) for pattern in self.asked.applied(EXCLUDE))


def _by_layer(rank: Operators) -> dict[int, list[tuple[Node, str]]]:
    """Operators that the model declares (they have a sharding), with their path inside the layer."""
    found: dict[int, list[tuple[Node, str]]] = defaultdict(list)
    for node, layer, place in rank.forward_in_layers:
        if node.input_strategy is not None:
            found[layer].append((node, ".".join(filter(None, (place, node.instance)))))
    return found


def _repeated(rank: Operators) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for node in rank.nodes:
        if rank.phase(node) == RECOMPUTED and (where := layer_of(rank.place(node))):
            found[where[0]] += 1
    return found


def _text(whole: set[int], some: set[int]) -> str:
    words = [f"all of layers {numbers_text(sorted(whole))}"] * bool(whole)
    words += [f"operators of layers {numbers_text(sorted(some))}"] * bool(some)
    return ", ".join(words) or "nothing"


MARK, PREFETCH, MOVE = "offload", "backward_prefetch", "MoveTo"


def swaps(config: RunConfig, ranks: Sequence[Operators]) -> Finding | None:
    """In each layer the operators that are named are marked, with the operators that pass while a result comes back, no others
    are, and something is moved where one is marked.
    """
    mistakes: list[Mistake] = []
    asked, found = set(), set()
    for rank in ranks:
        declared, moved = _swaps_by_layer(rank)
        for number, operators in sorted(declared.items()):
            expected = _wanted(swapped(config, number), operators)
            asked |= {number} if expected else set()
            found |= {number} if moved[number] else set()
            mistakes += [
                Mistake(rank.graph.rank, f"layer {number} {text}")
                for text in _mistakes(expected, operators, moved[number])
            ]
    if not (asked or found or mistakes):
        return None
    return Finding(
        "swap", f"layers {numbers_text(list(asked))}", f"layers {numbers_text(list(found))}", together(mistakes)
    )


def _swaps_by_layer(rank: Operators) -> tuple[dict[int, list[tuple[Node, str]]], dict[int, int]]:
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


def _mistakes(expected: Mapping[str, int], operators: list[tuple[Node, str]], moved: int) -> Iterator[str]:
    marked = {path: node.attributes.get(PREFETCH) for node, path in operators if node.attributes.get(MARK)}
    if missing := sorted(set(expected) - set(marked)):
        yield f"keeps {', '.join(missing)} on the device"
    if more := sorted(set(marked) - set(expected)):
        yield f"moves {', '.join(more)}, which nobody asked for"
    for path in sorted(set(expected) & set(marked)):
        if marked[path] != expected[path]:
            yield f"has {path} back {marked[path]} operators ahead, not {expected[path]}"
    if bool(moved) != bool(marked):
        yield f"has {moved} results moved, and {len(marked)} operators marked"
