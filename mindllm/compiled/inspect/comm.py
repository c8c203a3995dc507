"""``comm``: every exchange with other ranks, and what caused it.

The compiler names the operators it inserts after its reason: ``forward_op_…`` adds partial sums, ``redistribution_op_…`` changes
a layout, ``parallel_optimizer_…`` gathers sharded weights, ``mirror`` adds gradients of copies. Gradients take over the cause of
their forward operator.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.compiled_graph import IN_LENGTHS, CompiledGraph, Node
from mindllm.compiled.graph.cost import PRODUCTS, bytes_of
from mindllm.compiled.graph.operators import BACKWARD, Operators, without_numbers
from mindllm.compiled.inspect.tables import size_text, table_parts

if TYPE_CHECKING:
    from mindllm.results import Part

DEVICES_OF_A_NODE = 8
INSIDE, BETWEEN = "inside a node", "between nodes"

TENSOR, GRADIENT, NORM = "tensor parallel", "gradient", "gradient norm"
OPTIMIZER, PIPELINE, LAYOUT = "optimizer parallel", "pipeline", "layout change"
CONTEXT, EXPERTS, LOSS, MODEL = "context parallel", "expert parallel", "loss", "model"
CAUSES = {
    TENSOR: "partial sums of split products, and with sequence parallelism tokens gathered for them",
    GRADIENT: "gradients added over data-parallel copies",
    NORM: "the norm of all gradients",
    OPTIMIZER: "weights gathered from, and gradients scattered to, the ranks that keep their slices",
    PIPELINE: "activations and their gradients between stages",
    CONTEXT: "keys and values gathered or passed on, or heads exchanged for the sequence, where devices share sequences",
    EXPERTS: "tokens exchanged for those of the experts that a device has, and results back",
    LAYOUT: "operators next to each other are split differently: see the command redundant",
    LOSS: "the loss added over ranks",
    MODEL: "written in the model",
}
REDISTRIBUTION, RESHAPE = "redistribution_op", "Reshape"
CELLS_OF_EXPERTS = ("-SentTokens/", "-SharedExperts/")
"""Parts of the scopes of exchanges that the model makes itself for experts of sorted tokens."""
CELLS_OF_A_RING = ("-PassOn/", "-PassOnBackward/")
"""The same of keys and values that go round, each rank's to the next one alone."""
POINT_TO_POINT = ("Send", "Receive")
SEQUENCE_AXIS = "cp"  # of layouts, here and in MindFormers
SCORING = frozenset({"FlashAttentionScore", "BatchMatMul"})
SHAPING = frozenset({"Reshape", "Split", "Concat", "StridedSlice", "Cast"})
SCALING = SHAPING | {"Mul", "AllReduce"}
"""Passed beside experts, too: a product with one holds a layout, and ranks that split an expert add its results."""
LOOKUP = "Gather"


@dataclass(frozen=True)
class Exchange:
    """A collective of a step.

    Attributes:
        bytes: of the whole tensor that is exchanged, once.
        sent: bytes this rank sends in it, with the ring algorithms (Thakur et al., 2005): ``(n - 1) / n`` of the tensor, an
            AllReduce twice that; in a ring of keys all of it.
        times: runs per step.
    """

    operator: str
    cause: str
    place: str
    phase: str
    group: str
    ranks: tuple[int, ...]
    link: str
    bytes: int
    sent: int
    times: int
    scope: str


def exchanges(graph: CompiledGraph) -> list[Exchange]:
    """Every collective, in the order of the graph."""
    operators = Operators(graph)
    return [_exchange(operators, node) for node in graph.collectives()]


def totals(found: Iterable[Exchange]) -> list[dict[str, Any]]:
    """Runs, bytes and bytes sent per step by cause and link."""
    sums: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: {"times": 0, "bytes": 0, "sent": 0})
    for exchange in found:
        row = sums[exchange.cause, exchange.link]
        row["times"] += exchange.times
        row["bytes"] += exchange.bytes * exchange.times
        row["sent"] += exchange.sent * exchange.times
    return [{"cause": cause, "link": link, **row} for (cause, link), row in sorted(sums.items())]


def cause_of(operators: Operators, node: Node) -> str:
    """Why a collective is in the graph."""
    if node.op in POINT_TO_POINT:
        return PIPELINE
    if goes_round(node):
        return CONTEXT
    if node.op == IN_LENGTHS or any(cell in node.scope for cell in CELLS_OF_EXPERTS):
        return EXPERTS
    forward = operators.forward(node)
    if forward is not None and forward.op in ("AllGather", "ReduceScatter", "AllReduce", "AlltoAll"):
        return cause_of(operators, forward)
    name = node.instance
    if "GLOBALNORM" in name:
        return NORM
    if "parallel_optimizer" in name or "accumulation_shard" in name:
        return OPTIMIZER
    if "mirror" in name.lower():
        return GRADIENT
    if REDISTRIBUTION in name:
        if is_of_attention(operators, node):
            return CONTEXT
        if is_of_experts(operators, node):
            return EXPERTS
        return TENSOR if gathers_for_products(operators, node) else LAYOUT
    if "forward_op" in name or node.op == "ReduceScatter":
        return LOSS if math.prod(node.shapes[0]) == 1 else TENSOR
    return MODEL


def goes_round(node: Node) -> bool:
    """Return True if it passes keys and values of a sequence, or their gradients, to the next rank."""
    return any(cell in node.scope for cell in CELLS_OF_A_RING)


def gathers_for_products(operators: Operators, node: Node) -> bool:
    """Return True if it gathers tokens of sequence parallelism for matrix products (Korthikanti et al., 2022) or for looking up
    rows.
    """
    following = _behind_reshapes(operators, node)
    return node.op == "AllGather" and any(
        user.op in (*PRODUCTS, LOOKUP) for user in following if operators.phase(user) != BACKWARD
    )


def is_of_attention(operators: Operators, node: Node) -> bool:
    """Return True if it brings parts of a sequence to attention, or from it, over ranks that share sequences."""
    beside = {core.name for core in _around(operators, node, SHAPING)}
    place = operators.place(node)
    return any(
        node.ranks == _ranks_of_sequence(core, operators.graph.rank)
        for core in itertools.chain.from_iterable(operators.laid_out.get(op, ()) for op in SCORING)
        if core.name in beside or f"{place}.".startswith(f"{operators.place(core).rpartition('.')[0] or core.name}.")
    )


def is_of_experts(operators: Operators, node: Node) -> bool:
    """Return True if it exchanges tokens over the ranks that share experts, next to a product with stacked matrices."""
    cuts = [core.input_strategy for core in _around(operators, node, SCALING) if core.op in PRODUCTS]
    return any(cut and len(cut[1]) > 2 and cut[1][-3] == len(node.ranks) > 1 for cut in cuts)


def _around(operators: Operators, node: Node, passed: frozenset[str]) -> list[Node]:
    """Return the neighbors on both sides, across operators of some kinds."""
    return [
        *_through(operators.consumers, node, passed),
        *_through(operators.producers, node, passed),
    ]


def _through(neighbours: Callable[[Node], Iterable[Node]], node: Node, passed: frozenset[str]) -> Iterator[Node]:
    for other in neighbours(node):
        if other.op in passed:
            yield from _through(neighbours, other, passed)
        else:
            yield other


def _ranks_of_sequence(core: Node, rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` only along the axis over which sequences are split."""
    layout = next(iter(core.attributes["in_layout"]))
    names, sizes = layout.get("alias_name", ()), layout.get("device_matrix", ())
    if SEQUENCE_AXIS not in names:
        return ()
    axis = names.index(SEQUENCE_AXIS)
    step = math.prod(sizes[axis + 1 :])
    first = rank - rank // step % sizes[axis] * step
    return tuple(first + index * step for index in range(sizes[axis]))


def _behind_reshapes(operators: Operators, node: Node) -> Iterator[Node]:
    """Return the readers of a tensor across reshapes, which may flatten rows before a product."""
    for user in operators.consumers(node):
        if user.op in (RESHAPE, "Cast"):
            yield from _behind_reshapes(operators, user)
        else:
            yield user


def exchange_parts(found: list[Exchange], each: bool) -> Iterator[Part]:
    """Yield a table of exchanges, grouped or each, and one of totals."""
    groups: dict[tuple[Any, ...], list[Exchange]] = defaultdict(list)
    for number, exchange in enumerate(found):
        alike = (exchange.operator, exchange.cause, without_numbers(exchange.place), exchange.phase, exchange.ranks)
        groups[(number,) if each else (*alike, exchange.bytes)].append(exchange)
    rows = [
        (
            first.operator,
            first.cause,
            first.place if each else without_numbers(first.place) or "(step)",
            first.phase,
            _ranks_text(first.ranks),
            size_text(first.bytes),
            sum(exchange.times for exchange in alike),
        )
        for first, *more in groups.values()
        for alike in [[first, *more]]
    ]
    columns = ["operator", "cause", "where", "phase", "ranks", "bytes", "times"]
    yield from table_parts(f"{len(found)} exchanges", columns, rows, ["bytes", "times"])
    sums = [(r["cause"], r["link"], r["times"], size_text(r["bytes"]), size_text(r["sent"])) for r in totals(found)]
    yield from table_parts(
        "per step",
        ["cause", "link", "times", "bytes", "sent by this rank"],
        sums,
        ["times", "bytes", "sent by this rank"],
    )


def as_json(found: list[Exchange]) -> dict[str, Any]:
    """Every exchange and the totals."""
    return {"exchanges": [asdict(exchange) for exchange in found], "totals": totals(found)}


def _exchange(operators: Operators, node: Node) -> Exchange:
    given, yielded = bytes_of(operators.graph.input_tensors(node)), bytes_of(node.tensors)
    whole = given if node.op == "Send" else yielded if node.op in POINT_TO_POINT else max(given, yielded)
    cause = cause_of(operators, node)
    weight = operators.weight(node) if cause in (OPTIMIZER, GRADIENT) else ""
    return Exchange(
        operator=node.op,
        cause=cause,
        place=weight.rpartition(".")[0] or operators.place(node),
        phase=operators.phase(node),
        group=str(node.attributes.get("group", "")),
        ranks=node.ranks,
        link=_link(node.ranks),
        bytes=whole,
        sent=whole if goes_round(node) else _sent(node.op, whole, len(node.ranks)),
        times=operators.times(node),
        scope=node.scope,
    )


def _sent(op: str, whole: int, ranks: int) -> int:
    if op in POINT_TO_POINT:
        return whole if op == "Send" else 0
    rounds = 2 if op == "AllReduce" else 1
    return rounds * whole * (ranks - 1) // max(ranks, 1)


def _link(ranks: tuple[int, ...]) -> str:
    return INSIDE if len({rank // DEVICES_OF_A_NODE for rank in ranks}) <= 1 else BETWEEN


def _ranks_text(ranks: tuple[int, ...]) -> str:
    """``0-7``, ``0-56 by 8`` or the list."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step != 1 else "")
    return ", ".join(map(str, ranks))
