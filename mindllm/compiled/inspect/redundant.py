"""``redundant``: layout changes nobody asked for.

Where an operator's input is split differently from what yields it, MindSpore inserts operators that change the layout
(AllGather, AlltoAll, Split and Concat, StridedSlice, Reshape) and says nothing. What was asked for is left out: tokens that
sequence parallelism gathers for matrix products, what ranks of a sequence exchange around attention, tokens on the way to their
experts and back. So is cutting the batch, which every rank holds whole with ``full_batch``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.compiled_graph import COLLECTIVES, PARTIAL, CompiledGraph, Node
from mindllm.compiled.graph.cost import PRODUCTS, bytes_of
from mindllm.compiled.graph.operators import BACKWARD, FORWARD, Operators, without_numbers
from mindllm.compiled.inspect.comm import LAYOUT, REDISTRIBUTION, cause_of
from mindllm.compiled.inspect.recompute import VIEWS
from mindllm.compiled.inspect.tables import size_text
from mindllm.terminal.text import styled

if TYPE_CHECKING:
    from mindllm.results import Part

Strategy = tuple[int, ...]


@dataclass(frozen=True)
class LayoutChange:
    """Operators the compiler put between a producer and a consumer.

    Attributes:
        producer, consumer: operators and the cells they are in, as ``SiLU in feed_forward``.
        before, after: into how many parts each dimension is cut on both sides; None where the graph does not say.
        chain: operators in between.
        bytes: exchanged with other ranks in the forward pass, per run.
        copied: bytes of what the chain yields, exchanged or not, per run.
        source: line of the consumer.
        fix: what to write instead.
        layers: alike changes in other layers are counted here.
    """

    producer: str
    consumer: str
    place: str
    before: Strategy | None
    after: Strategy | None
    chain: tuple[str, ...]
    bytes: int
    copied: int
    times: int
    source: str
    code: str
    fix: str
    layers: int = 1


def layout_changes(graph: CompiledGraph) -> list[LayoutChange]:
    """Return the layout changes of the forward pass, the most expensive first. Equal ones of several layers appear once."""
    operators = Operators(graph)
    inserted = {node.name for node in operators.nodes if _changes_layout(operators, node)}
    found = []
    for node in operators.nodes:
        if node.name not in inserted:
            continue
        following = [user for user in operators.consumers(node) if user.name not in inserted]
        consumers = [user for user in following if user.op != PARTIAL and operators.phase(user) != BACKWARD]
        if consumers:
            chain = _chain(operators, node, inserted)
            if not _asked_for(operators, chain):
                found.append(_change(operators, chain, consumers))
    return _alike_together(sorted(found, key=lambda change: (-change.bytes * change.times, -change.copied)))


def change_parts(changes: Sequence[LayoutChange]) -> Iterator[Part]:
    """Yield a paragraph for each change."""
    exchanged = sum(change.bytes * change.times * change.layers for change in changes)
    if not changes:
        yield "no layout change that nobody asked for"
        return
    kinds = (f"{len(changes)} kinds of layout change", "bold")
    yield styled(kinds, f", {size_text(exchanged)} exchanged forward per step\n")
    for number, change in enumerate(changes, start=1):
        where = f" x {change.layers} layers" if change.layers > 1 else ""
        yield styled((f"{number}. {change.producer} -> {change.consumer}", "bold"), (where, "dim"))
        yield f"   {_cut(change.before)} -> {_cut(change.after)} by {' -> '.join(change.chain)}"
        traffic = f"{size_text(change.bytes)} exchanged, {size_text(change.copied)} yielded"
        yield f"   {traffic}, {change.times} times a step, and back again for the gradient"
        if change.source:
            yield f"   {change.source}: {change.code}"
        yield styled("   ", ("fix:", "green"), f" {change.fix}\n")


def as_json(changes: Sequence[LayoutChange]) -> dict[str, Any]:
    """Return all fields."""
    return {"layout_changes": [asdict(change) for change in changes]}


def _changes_layout(operators: Operators, node: Node) -> bool:
    return node.instance.startswith(REDISTRIBUTION) and operators.phase(node) == FORWARD


def _chain(operators: Operators, last: Node, inserted: set[str]) -> list[Node]:
    """Return the inserted operators that lead to ``last``, in order."""
    chain, found = [last], {last.name}
    for node in chain:
        before = {source.name: source for source in operators.producers(node)}
        fresh = [source for name, source in before.items() if name in inserted and name not in found]
        chain += fresh
        found.update(source.name for source in fresh)
    return chain[::-1]


def _asked_for(operators: Operators, chain: Sequence[Node]) -> bool:
    exchanging = [node for node in chain if node.op in COLLECTIVES]
    if exchanging:
        return all(cause_of(operators, node) != LAYOUT for node in exchanging)
    return not any(_holds_activations(operators, node) for node in chain if node.op not in VIEWS)


def _holds_activations(operators: Operators, node: Node) -> bool:
    """Return True if its input was computed from weights. Indices, labels and masks are integers or belong to no cell."""
    return (
        node.dtypes != ()
        and node.dtypes[0].startswith(("float", "bfloat"))
        and any(source.input_strategy for source in operators.producers(node))
    )


def _change(operators: Operators, chain: Sequence[Node], consumers: Sequence[Node]) -> LayoutChange:
    first, last, consumer = chain[0], chain[-1], consumers[0]
    producer = next(operators.producers(first), None)
    while producer is not None and producer.op in COLLECTIVES:  # adds the partial sums of the operator before it
        producer = next(operators.producers(producer), None)
    before = _yielded_as(producer) if producer else None
    after = _taken_as(operators, consumer, last)
    lines = operators.graph.source(consumer)
    line = lines[-1] if lines else None
    exchanged = [node for node in chain if node.op in COLLECTIVES]
    return LayoutChange(
        producer=_named(operators, producer) if producer else "an input",
        consumer=_named(operators, consumer),
        place=operators.place(consumer),
        before=before,
        after=after,
        chain=tuple(node.op for node in chain),
        bytes=sum(max(bytes_of(operators.graph.input_tensors(node)), bytes_of(node.tensors)) for node in exchanged),
        copied=bytes_of(last.tensors),
        times=operators.times(last),
        source=str(line) if line else "",
        code=line.text if line else "",
        fix=_fix(operators, producer, consumer, before, after),
    )


def _yielded_as(node: Node) -> Strategy | None:
    """Return how the output of an operator is cut: as declared, or like its inputs."""
    if node.output_strategy:
        return node.output_strategy[0]
    given = node.input_strategy
    if not given:
        return None
    if node.op in PRODUCTS and len(given) > 1:
        rows, inner = given[0][:-1], given[0][-1]
        return (*rows, given[1][-1] if given[1][-2] == inner != given[1][-1] else given[1][-2])
    dimensions = len(node.shapes[0]) if node.shapes else 0
    return next((cut for cut in given if len(cut) == dimensions), None)


def _taken_as(operators: Operators, consumer: Node, last: Node) -> Strategy | None:
    given = consumer.input_strategy
    if not given:
        return None
    for index, name in enumerate(consumer.inputs[: len(given)]):
        source = operators.named.get(name)
        if source is not None and (source is last or last in operators.origins(name)):
            return given[index]
    return None


def _fix(
    operators: Operators,
    producer: Node | None,
    consumer: Node,
    before: Strategy | None,
    after: Strategy | None,
) -> str:
    """Shard the consumer as what it reads, unless that cannot be known."""
    at = f"{operators.place(consumer)}.{consumer.instance or consumer.op}"
    if before is None or after is None:
        return (
            f"give {at} the strategy of what it reads, or its producer the one it needs; the graph does not tell both"
        )
    name = f"{operators.place(producer)}.{producer.instance or producer.op}" if producer else "its producer"
    there, taken = math.prod(before), math.prod(after)
    if taken < there:
        return f"shard {at} with {_cut(before)}: it takes {taken} parts where {there} are there, so devices repeat its work"
    if taken > there or consumer.op in PRODUCTS:
        return f"shard {name} so that it yields {_cut(after)}"
    return f"shard {at} with {_cut(before)}, or {name} so that it yields {_cut(after)}"


def _named(operators: Operators, node: Node) -> str:
    return f"{node.op} in {without_numbers(operators.place(node)) or 'the step'}"


def _cut(strategy: Strategy | None) -> str:
    return f"({', '.join(map(str, strategy))})" if strategy is not None else "unknown"


def _alike_together(changes: Sequence[LayoutChange]) -> list[LayoutChange]:
    groups: dict[tuple[Any, ...], list[LayoutChange]] = {}
    for change in changes:
        key = (change.producer, change.consumer, change.before, change.after, change.chain, change.bytes, change.source)
        groups.setdefault(key, []).append(change)
    return [replace(alike[0], layers=len(alike)) for alike in groups.values()]
