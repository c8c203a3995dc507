"""The planted mistakes: kinds of edits, made to operators of each form that they fit, and the places that are right to name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindllm.compiled.execute.exchange import RECEIVE, SEND, Exchange
from mindllm.compiled.graph.compiled_graph import CONSTANT, CompiledGraph, Node
from mindllm.compiled.graph.operators import Operators
from research.parallel_faults import edits
from research.parallel_faults.cells import cell_of
from research.parallel_faults.edits import Edit, Where, edited

OWN = "own"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
TTRACE = "https://arxiv.org/abs/2506.09280"
MOST = 3
"""Operators of one form that one kind of mistake is planted at."""


@dataclass(frozen=True)
class Fault:
    """One mistake, planted at the operator of this scope on all ranks that have it, or on one of them.

    Attributes:
        places: cells and parameters, any of which is right to name.
        between: of an operator that is missing, scopes of those before and of those behind it: to name both is right, too.
        source: where it was published; ``own`` where it was not.
        rank: the one rank it is planted on.
    """

    name: str
    form: str
    what: str
    source: str
    scopes: frozenset[str]
    edit: Edit
    fits: Where
    places: tuple[str, ...]
    rank: int | None = None
    between: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    def plant(self, graphs: Sequence[CompiledGraph]) -> list[CompiledGraph]:
        """Copies of the graphs with the mistake."""
        only = self.rank
        return [edited(one, self.scopes, self.fits, self.edit) if only in (None, one.rank) else one for one in graphs]


@dataclass(frozen=True)
class Kind:
    """A mistake that can be made at every operator that ``fits``."""

    name: str
    what: str
    fits: Where
    edit: Edit
    source: str = OWN
    one_rank: bool = False


def _op(*names: str, backward: bool | None = None, path: str = "", but: str = "") -> Where:
    def fits(graph: CompiledGraph, node: Node) -> bool:
        return (
            node.op in names
            and backward in (None, node.backward)
            and (not path or re.search(path, node.scope) is not None)
            and (not but or re.search(but, node.scope) is None)
        )

    return fits


def _of_gradient(graph: CompiledGraph, node: Node) -> bool:
    return node.op == "AllReduce" and "Mirror" in node.scope and "probe" not in _parameter(graph, node)


def _of_norm_gradient(graph: CompiledGraph, node: Node) -> bool:
    return _of_gradient(graph, node) and "norm" in node.scope


def _slice_of_rank(graph: CompiledGraph, node: Node) -> bool:
    if node.op != "StridedSlice" or node.backward or not node.instance.startswith("redistribution"):
        return False
    begin = graph.constants.get(node.inputs[1])
    return isinstance(begin, tuple) and any(begin) and min(begin) >= 0


def _divides_loss(graph: CompiledGraph, node: Node) -> bool:
    return node.op in ("RealDiv", "Mul") and "VirtualDiv" in node.scope and "Grad_" in node.scope


def _updates(part: str) -> Where:
    return lambda graph, node: node.op == "AdamWeightDecay" and re.search(part, node.inputs[0]) is not None


def _accumulates(graph: CompiledGraph, node: Node) -> bool:
    return node.op == "AssignAdd" and "accu_grads." in node.inputs[0]


def _clears(graph: CompiledGraph, node: Node) -> bool:
    return node.op == "Assign" and "accu_grads." in node.inputs[0]


def _exchange(op: str, backward: bool) -> Where:
    return _op(op, backward=backward, but="Mirror|global_norm|parallel_optimizer|MiniStepAllGather|MicroStepAllGather")


def _sums(graph: CompiledGraph, node: Node) -> bool:
    """Of the forward pass; the largest of the largest is no mistake."""
    return _exchange("AllReduce", False)(graph, node) and node.attributes.get("op") == "sum"


def _adds_norm(graph: CompiledGraph, node: Node) -> bool:
    return _op("AllReduce", path="global_norm")(graph, node) and len(node.ranks) > 1


def _residual(graph: CompiledGraph, node: Node) -> bool:
    return node.op == "Add" and re.search(r"DecoderLayer/Add", node.scope) is not None and not node.backward


KINDS = (
    Kind("gradient not summed", "the sum of a weight's gradient over ranks is missing", _of_gradient, edits.dropped),
    Kind(
        "norm gradient not summed",
        "the same of a norm, whose rows ranks share",
        _of_norm_gradient,
        edits.dropped,
        f"{MEGATRON}/issues/1446",
    ),
    Kind("gradient summed twice", "a weight's gradient is summed over ranks twice", _of_gradient, edits.twice),
    Kind(
        "largest gradient",
        "the largest gradient of ranks in place of their sum",
        _of_gradient,
        edits.with_attributes(op="max"),
    ),
    Kind("gradient halved", "a mean over two ranks in place of a sum", _of_gradient, edits.scaled(0.5)),
    Kind(
        "gradient over another group",
        "summed over another group of ranks, or none",
        _of_gradient,
        edits.other_group,
        TTRACE,
    ),
    Kind(
        "shared gradient halved",
        "gradients cut by the optimizer are averaged",
        _op("ReduceScatter", path="Mirror|MicroStepAllGather|MiniStepAllGather"),
        edits.scaled(0.5),
    ),
    Kind(
        "shared gradient in another order",
        "parts of a gradient go to the wrong ranks",
        _op("ReduceScatter", path="Mirror|MicroStepAllGather|MiniStepAllGather"),
        edits.reversed_ranks,
    ),
    Kind(
        "weight gathered in another order",
        "parts of a weight that the optimizer cut are joined the wrong way round",
        _op(
            "AllGather",
            path="parallel_optimizer|MirrorOperator|MicroStepAllGather|MiniStepAllGather|AllGather",
            backward=False,
            but="CausalLM",
        ),
        edits.reversed_ranks,
    ),
    Kind(
        "norm over one rank",
        "the norm of all gradients is that of a rank",
        _adds_norm,
        edits.dropped,
        f"{MEGATRON}/pull/5916",
    ),
    Kind(
        "small gradients scaled up",
        "clipping enlarges gradients whose norm is below the threshold",
        _op("Minimum", path="update-ApplyGradients/"),
        edits.dropped,
    ),
    Kind("norm summed twice", "squares are added over ranks twice", _adds_norm, edits.twice),
    Kind(
        "partial products not summed",
        "sums over tensor-parallel ranks are the largest of them",
        _exchange("ReduceScatter", False),
        edits.with_attributes(op="max"),
    ),
    Kind(
        "rows scattered in another order",
        "rows of a sum go to the wrong ranks",
        _exchange("ReduceScatter", False),
        edits.reversed_ranks,
    ),
    Kind(
        "rows gathered in another order",
        "rows of hidden states are joined the wrong way round",
        _exchange("AllGather", False),
        edits.reversed_ranks,
    ),
    Kind("sum averaged", "a sum over ranks is averaged", _exchange("ReduceScatter", False), edits.scaled(0.5)),
    Kind(
        "sum of the forward pass missing",
        "an AllReduce of the forward pass is not made",
        _exchange("AllReduce", False),
        edits.dropped,
        f"{MEGATRON}/issues/7452",
    ),
    Kind(
        "sum of the forward pass twice",
        "an AllReduce of the forward pass is made twice",
        _sums,
        edits.twice,
    ),
    Kind(
        "gradient of gathered rows averaged",
        "the gradient of gathered rows is averaged",
        _exchange("ReduceScatter", True),
        edits.scaled(0.5),
    ),
    Kind(
        "gradient of gathered rows in another order",
        "gradients of rows go to the wrong ranks",
        _exchange("ReduceScatter", True),
        edits.reversed_ranks,
    ),
    Kind(
        "gradient of a sum in another order",
        "gradients of scattered rows are joined the wrong way round",
        _exchange("AllGather", True),
        edits.reversed_ranks,
    ),
    Kind(
        "gradient of a sum doubled",
        "gradients of scattered rows are doubled",
        _exchange("AllGather", True),
        edits.scaled(2.0),
    ),
    Kind(
        "gradient of activations not summed",
        "a sum of the backward pass is missing",
        _op("AllReduce", backward=True, but="Mirror|global_norm"),
        edits.dropped,
        f"{MEGATRON}/issues/7452",
    ),
    Kind(
        "exchange of parts in another order",
        "parts that all ranks exchange go to the wrong ones",
        _op("AlltoAll", backward=False),
        edits.reversed_ranks,
    ),
    Kind(
        "exchange of gradients in another order",
        "gradients that all ranks exchange go to the wrong ones",
        _op("AlltoAll", backward=True),
        edits.reversed_ranks,
        f"{MEGATRON}/issues/1464",
    ),
    Kind("exchanged parts doubled", "what was exchanged is scaled", _op("AlltoAll"), edits.scaled(2.0)),
    Kind(
        "attention's scale",
        "scores are scaled by another constant",
        _op("FlashAttentionScore"),
        edits.operand_scaled(0, 2.0),
    ),
    Kind(
        "gradient of attention",
        "the gradient of queries is scaled",
        _op("FlashAttentionScoreGrad"),
        edits.operand_scaled(0, 1.5),
        f"{MEGATRON}/issues/1465",
    ),
    Kind("epsilon of a norm", "another epsilon than the model's", _op("RmsNorm"), edits.with_constant(2, 0.3)),
    Kind("activation missing", "the activation is left out", _op("SiLU"), edits.dropped),
    Kind(
        "gradient of an activation missing",
        "the gradient of the activation is left out",
        _op("SiLUGrad"),
        edits.dropped,
    ),
    Kind("residual missing", "a layer's input is not added", _residual, edits.second_operand),
    Kind(
        "rotary angles exchanged",
        "halves are joined the wrong way round",
        _op("MakeTuple", path="rotary", backward=False),
        edits.swapped_operands,
    ),
    Kind(
        "one rank's product",
        "a product is wrong on one rank alone",
        _op("MatMul", backward=False, path="feed_forward|attention"),
        edits.scaled(1.01),
        one_rank=True,
    ),
    Kind(
        "one rank's gradient",
        "a product of the backward pass is wrong on one rank alone",
        _op("MatMul", backward=True, path="feed_forward|attention"),
        edits.scaled(1.01),
        one_rank=True,
    ),
    Kind(
        "product of sorted tokens",
        "the product of a group of experts is scaled",
        _op("GroupedMatmul", backward=False),
        lambda graph, node: _scaled_operand(graph, node),
    ),
    Kind(
        "router's weights",
        "weights of the chosen experts are scaled",
        _op("RealDiv", "Softmax", path="router", backward=False),
        edits.scaled(1.1),
        f"{MEGATRON}/issues/7452",
    ),
    Kind(
        "router's gradient",
        "the gradient of the router is scaled",
        _op("SoftmaxBackward", path="router"),
        edits.scaled(2.0),
        "https://github.com/huggingface/transformers/issues/48687",
    ),
    Kind("slice of the first rank", "every rank takes the first rank's part", _slice_of_rank, edits.first_part),
    Kind(
        "loss scaled by the size of a group",
        "the gradient of the loss is not divided by the number of its copies",
        _divides_loss,
        edits.dropped,
        f"{MEGATRON}/issues/906",
    ),
    Kind("no clipping", "the factor of clipping is one", _op("Minimum", path="ApplyGradients"), edits.second_operand),
    Kind(
        "a weight not updated",
        "the update of one weight is left out",
        _updates(r"w[12q]\.weight|lm_head"),
        edits.left_out,
    ),
    Kind("decay of a norm", "a norm decays", _updates(r"norm\.weight|norm_out\.weight"), edits.with_constant(7, 0.01)),
    Kind("beta", "another beta for one weight", _updates(r"wo\.weight|w3\.weight"), edits.with_constant(4, 0.8)),
    Kind("accumulation scaled", "an accumulated gradient counts half", _accumulates, edits.operand_scaled(1, 0.5)),
    Kind("accumulation lost", "a micro-batch's gradient is not accumulated", _accumulates, edits.left_out),
    Kind("accumulator kept", "an accumulator is not cleared", _clears, edits.left_out),
    Kind("received hidden states scaled", "what a stage receives is scaled", _op("Receive"), edits.scaled(2.0)),
    Kind("sent hidden states scaled", "what a stage sends is scaled", _op("Send"), edits.operand_scaled(0, 2.0)),
)


def _scaled_operand(graph: CompiledGraph, node: Node) -> list[Node]:
    """The product behind a multiplication of its matrices, which are a tuple of one."""
    from dataclasses import replace

    from mindllm.compiled.graph.compiled_graph import OtherType

    item, factor = edits.constant(node, "item", 0), edits.constant(node, "factor", 1.5)
    taken = Node("TupleGetItem", f"{node.name}_taken", (node.inputs[0], item.name), OtherType("any"), node.scope, {})
    times = Node("Muls", f"{node.name}_times", (taken.name, factor.name), OtherType("any"), node.scope, {})
    joined = Node("MakeTuple", f"{node.name}_joined", (times.name,), OtherType("any"), node.scope, {})
    return [item, factor, taken, times, joined, replace(node, inputs=(joined.name, *node.inputs[1:]))]


def faults_of(form: str, graphs: Sequence[CompiledGraph]) -> Iterator[Fault]:
    """The mistakes that can be planted into the graphs of a form."""
    for kind in KINDS:
        found: dict[str, tuple[CompiledGraph, Node]] = {}
        for graph in graphs:
            for node in graph.nodes():
                if kind.fits(graph, node):
                    found.setdefault(node.scope, (graph, node))
        for number, scope in enumerate(_spread(sorted(found), MOST)):
            graph, node = found[scope]
            rank = (
                graphs[-1].rank if kind.one_rank and _has(graphs[-1], scope) else graph.rank if kind.one_rank else None
            )
            name = f"{form}: {kind.name} {number + 1}"
            yield Fault(
                name,
                form,
                kind.what,
                kind.source,
                frozenset({scope}),
                kind.edit,
                kind.fits,
                _places(graphs, graph, node),
                rank,
                _between(graph, node, kind),
            )


def _has(graph: CompiledGraph, scope: str) -> bool:
    return any(node.scope == scope for node in graph.nodes())


def _spread(scopes: list[str], count: int) -> list[str]:
    """The first, the last, and some between."""
    if len(scopes) <= count:
        return scopes
    return [scopes[round(index * (len(scopes) - 1) / (count - 1))] for index in range(count)]


def _parameter(graph: CompiledGraph, node: Node) -> str:
    found = node.primal.get("mirror_user_id", node.attributes.get("mirror_user_id", ""))
    return found if isinstance(found, str) else ""


def _places(graphs: Sequence[CompiledGraph], graph: CompiledGraph, node: Node) -> tuple[str, ...]:
    """The operator itself, its cell, the parameter whose gradient it exchanges or that it changes, of a message the other end.

    The cell of a gradient is that of its forward operator: MindSpore gives gradients the scope of any operator of their kind.
    """
    written = _written(node) or next(filter(None, map(_written, _users(graph, node))), "")
    if node.op == "AdamWeightDecay":
        return (written,)
    if cell_of(node.scope).startswith("update.global_norm"):
        return ("update", "update.global_norm")
    operators = Operators(graph)
    forward = operators.forward(node) if node.backward else None
    cell = operators.place(forward) if forward else cell_of(node.scope)
    return tuple(filter(None, (node.scope, cell, _parameter(graph, node), written, *_other_ends(graphs, graph, node))))


def _between(graph: CompiledGraph, node: Node, kind: Kind) -> tuple[frozenset[str], frozenset[str]]:
    if kind.edit not in (edits.dropped, edits.second_operand, edits.left_out):
        return frozenset(), frozenset()
    computed = [other for other in graph.nodes() if other.op != CONSTANT]
    before = frozenset(other.scope for other in computed if other.name in node.inputs and cell_of(other.scope))
    return before, frozenset(other.scope for other in computed if node.name in other.inputs)


def _written(node: Node) -> str:
    """The weight that an operator changes, or whose gradient or state it does; empty where it changes none."""
    if not node.inputs or node.op not in ("AdamWeightDecay", "AssignAdd", "Assign"):
        return ""
    return re.sub(r"^▸?(accu_grads|adam_[mv])\.", "", node.inputs[0].rpartition(":")[2])


def _users(graph: CompiledGraph, node: Node) -> Iterator[Node]:
    """What uses a gradient directly, where it is an exchange."""
    if node.backward and node.exchanges:
        yield from (user for user in graph.nodes() if node.name in user.inputs)


def _other_ends(graphs: Sequence[CompiledGraph], graph: CompiledGraph, node: Node) -> Iterator[str]:
    """Scopes of what receives a message that is sent, or sends what is received."""
    if node.op not in (SEND, RECEIVE):
        return
    channel = Exchange(graph.rank, node, None).channel
    for other in graphs:
        for end in other.nodes():
            if end.op in (SEND, RECEIVE) and end.op != node.op and Exchange(other.rank, end, None).channel == channel:
                yield end.scope
