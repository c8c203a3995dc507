"""The operators of a decoder layer on one rank, forward, backward, and what recomputation repeats.

Shapes follow Megatron-LM's split (Shoeybi et al., 2019; sequence parallel: Korthikanti et al., 2022): the query, key, value and
first feed-forward products by columns, the other two by rows. Traffic counts every tensor that a fused kernel reads or writes
once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import FeedForwardSpec
from mindllm.architecture.quantization import bits_of
from mindllm.config.recompute import names_operator
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.timing.costs.attention import MASKED, MERGE, MERGE_PASSES, attention_work
from mindllm.timing.costs.dropout import DRAWN_AGAIN, OF_MASK, OF_RESULTS, dropout_work
from mindllm.timing.costs.exchanges import ROUND, ROUND_AND_BACK
from mindllm.timing.costs.feed_forward import OF_NUMBERS, experts_work, feed_forward_work, sorts_split_tokens
from mindllm.timing.costs.work import (
    ATTENTION,
    FP32_BYTES,
    HALF_BYTES,
    MASK,
    NORM_PASSES,
    Exchange,
    Operator,
    Work,
    elementwise,
    product,
)
from mindllm.timing.workload import Numerics, Strategy

WHOLE_ON_A_RANK = (
    "eh_proj.",
    "feed_forward.router.",
    "feed_forward.shared_gate.",
    "attention.wq_down.",
    "attention.wkv_down.",
    "attention.wk_rotary.",
    "attention_adapter.",
    "feed_forward_adapter.",
)
"""Weights that tensor-parallel ranks do not share (``parallel/sharding``); norms and biases are too small to matter."""
HELD = ".held"
"""Ends the names of operators that make a matrix of codes."""
SELECTING = ("select_recompute", "select_recompute_exclude")
"""Keys of patterns that choose operators, of layers that are not and that are recomputed as a whole."""
OF_SEQUENCES = tuple(
    f"attention.{name}" for name in ("attention.", "scores", "softmax", "dropout", "context", "apply_rotary")
)
"""What attention computes between its projections, by the beginnings of names."""
SORTED_TOKENS = "feed_forward.experts."
"""Begins the names of exchanges that experts of sorted tokens make themselves; the last one's result nobody needs twice."""
RESIDUAL, RESIDUAL_PASSES = "residual", (3.0, 1.5)
"""Ends the name of a sum of hidden states, whose tensors in half precision are read and written forward and backward so often."""
WIDE, WIDE_PASSES = "wide_residual", (6.0, 4.5)
"""Of one in single precision: three tensors of twice the bytes, in both directions. What is added is cast, and back; the norm in
front casts no more, which is as much."""
FLASH_BACKWARD = 2.5  # five products instead of two (Dao, 2023, section 3.1)


def forward_work(spec: LayerSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics) -> Work:
    """One micro-batch of ``tokens`` tokens through a layer."""
    return tuple(_forward(spec, tokens, seq_length, strategy, numerics))


def _forward(
    spec: LayerSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator | Exchange]:
    hidden = HALF_BYTES * tokens * spec.attention.hidden_size
    outside = hidden / strategy.sequence_ranks
    if spec.is_mtp:
        width = spec.attention.hidden_size
        yield from (elementwise(f"{name}.norm", outside, NORM_PASSES[0]) for name in ("enorm", "hnorm"))
        yield elementwise("join", outside, 4.0)
        yield product("eh_proj.matmul", tokens / strategy.sequence_ranks, 2 * width, width, numerics.compute)
    attention = attention_work(spec.attention, tokens, seq_length, strategy, numerics)
    feed_forward: Iterator[Operator | Exchange]
    splits = sorts_split_tokens(spec.feed_forward)
    if isinstance(spec.feed_forward, FeedForwardSpec):
        feed_forward, summed = feed_forward_work(spec.feed_forward, tokens, strategy, numerics), True
    else:  # what experts yield is whole on every rank: only a shared one leaves sums to add
        feed_forward = experts_work(spec.feed_forward, tokens, seq_length, strategy, numerics)
        summed = spec.feed_forward.shared is not None
    parts = (
        ("attention", spec.norms[0], attention, True),
        ("feed_forward", spec.norms[1], feed_forward, summed),
    )
    for part, norm, inside, adds_up in parts:
        yield elementwise(f"{norm}.norm", outside, NORM_PASSES[0])
        if strategy.sequence_parallel and not (part == "feed_forward" and splits):
            yield Exchange(f"{norm}.gather", "AllGather", hidden)
        yield from held_work(spec, part, strategy)
        yield from inside
        yield from adapter_work(spec, part, tokens, strategy, numerics)
        if adds_up:
            yield Exchange(f"{part}.reduce", "ReduceScatter" if strategy.sequence_parallel else "AllReduce", hidden)
        yield from bottleneck_work(spec, part, tokens, strategy, numerics)
        if spec.norm_output:
            yield elementwise(f"{part}_post_norm.norm", outside, NORM_PASSES[0])
        fused = spec.dropout > 0 and numerics.dropout == "fused"
        if spec.dropout and not fused:
            yield from dropout_work(f"{part}_dropout", outside, numerics)
        name, passes = (WIDE, WIDE_PASSES[0]) if numerics.wide_residual else (RESIDUAL, RESIDUAL_PASSES[0])
        yield elementwise(f"{part}.{name}", outside, passes + MASK * fused)


def in_row_parts(whole: Work, part: Work, count: int) -> Work:
    """A layer of which ``count`` parts of the rows go their own ways outside attention, from its work with all rows and with
    those of one part.
    """
    cut = tuple(one for one in part if is_of_rows(one))
    return (*(one for one in whole if not is_of_rows(one)), *cut * count)


def is_of_rows(one: Operator | Exchange) -> bool:
    """Whether it is outside attention proper, where no token sees another."""
    return not any(one.name.startswith(name) for name in OF_SEQUENCES)


def held_work(spec: LayerSpec, part: str, strategy: Strategy) -> Iterator[Operator]:
    """What makes the matrices of one part out of codes (``models/dequantize.py``), and brings them to half precision."""
    for code in spec.codes:
        if not code.module.startswith(f"{part}."):
            continue
        ranks = 1 if f"{code.module}.".startswith(WHOLE_ON_A_RANK) else strategy.model_parallel
        numbers = code.out_features * code.in_features / ranks
        packed = numbers * bits_of(code.code) / 8
        name = f"{code.module}{HELD}"
        yield elementwise(name, packed, 1.0 + FP32_BYTES)  # to integers that a table is read by
        yield elementwise(name, FP32_BYTES * (packed + numbers), 1.0)
        further = 1 + code.has_zeros + code.ordered  # scales, zero points, the order of columns
        yield from further * (elementwise(name, FP32_BYTES * numbers, 2.0),)
        yield elementwise(name, numbers, FP32_BYTES + HALF_BYTES)


def adapter_work(
    spec: LayerSpec, part: str, tokens: float, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator | Exchange]:
    """Both products of the adapters of one part, their dropout and the sums; the narrow side is whole on every rank.

    Where the input of a product is split, ranks add up the narrow side, and with sequence parallel each goes on with its tokens.

    Raises:
        UserError: adapters have lengths of rows (DoRA), whose time is not modelled.
    """
    ranks = strategy.model_parallel
    for adapter in spec.adapters:
        if not adapter.module.startswith(f"{part}."):
            continue
        if adapter.dora:
            raise UserError("a layer has adapters with use_dora, whose time is not modelled; only LoRA is predicted")
        split_input, inner = adapter.splits_input, adapter.rank_input(ranks)
        out = adapter.out_features / (1 if split_input else ranks)
        if adapter.dropout:
            yield from dropout_work(f"{adapter.module}.adapter.dropout", HALF_BYTES * tokens * inner, numerics)
        yield product(f"{adapter.module}.adapter.down", tokens, inner, adapter.rank, numerics.compute)
        if split_input:
            op = "ReduceScatter" if strategy.sequence_parallel else "AllReduce"
            yield Exchange(f"{adapter.module}.adapter.reduce", op, HALF_BYTES * tokens * adapter.rank)
        own = tokens / (strategy.sequence_ranks if split_input else 1)
        if adapter.has_values:
            yield elementwise(f"{adapter.module}.adapter.values", HALF_BYTES * own * adapter.rank, 2.0)
        yield product(f"{adapter.module}.adapter.up", own, adapter.rank, out, numerics.compute)
        yield elementwise(f"{adapter.module}.adapter.add", HALF_BYTES * own * out, 3.0)


def bottleneck_work(
    spec: LayerSpec, part: str, tokens: float, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    """Both products behind one part; every rank has the whole weights, and the tokens that its norms have."""
    own = tokens / (strategy.model_parallel if strategy.sequence_parallel else 1)
    for bottleneck in spec.bottlenecks:
        if bottleneck.module != part:
            continue
        hidden, length, name = bottleneck.hidden_size, bottleneck.length, bottleneck.name
        yield product(f"{name}.down.matmul", own, hidden, length, numerics.compute)
        yield elementwise(f"{name}.gelu", HALF_BYTES * own * length, 4.0)
        yield product(f"{name}.up.matmul", own, length, hidden, numerics.compute)
        yield elementwise(f"{name}.add", HALF_BYTES * own * hidden, 4.0)


MIRRORED: Mapping[str, str] = {"AllGather": "ReduceScatter", "ReduceScatter": "AllGather", ROUND: ROUND_AND_BACK}


def backward_work(forward: Work, frozen: Collection[str] = (), adds: bool = False) -> Work:
    """Gradients of ``forward``, in the opposite order; those of weights that are not ``frozen`` are among them.

    ``adds``: each of these is added to a sum by a kernel of its own, which reads both and writes one.
    """
    found = tuple(gradient for one in reversed(forward) for gradient in _gradients(one, frozen))
    return tuple(each for one in found for each in _summed(one)) if adds else found


def _summed(one: Operator | Exchange) -> tuple[Operator | Exchange, ...]:
    """A gradient, and behind that of a weight the sum that it is added to, in half precision."""
    if isinstance(one, Exchange) or not (one.sizes and one.name.endswith(".weight")):
        return (one,)
    if one.name.startswith(OF_SEQUENCES):
        return (one,)  # scores have no weights
    _, rows, _ = one.sizes
    return one, elementwise(f"{one.name}.sum", HALF_BYTES * one.flops / (2 * rows), 3.0)


def _gradients(one: Operator | Exchange, frozen: Collection[str]) -> Iterator[Operator | Exchange]:
    if isinstance(one, Exchange):
        if one.name.endswith(OF_NUMBERS):
            return
        yield Exchange(one.name, MIRRORED.get(one.op, one.op), one.bytes, one.axis)
    elif one.sizes:
        rows, inner, columns = one.sizes
        batch = one.flops / (2 * rows * inner * columns)
        yield product(one.name, rows, columns, inner, one.dtype, batch)
        if f"{one.name.removesuffix('.matmul')}.weight" not in frozen:
            yield product(f"{one.name}.weight", inner, rows, columns, one.dtype, batch)
    elif one.name.endswith(HELD):
        return  # codes have no gradient; what is made of them is made again (repeated_work)
    elif one.kind == ATTENTION:
        # scores are made again, and masked again
        yield replace(one, flops=one.flops * FLASH_BACKWARD, bytes=one.bytes * 2)
    elif passes := backward_passes(one.name):
        yield Operator(one.name, one.kind, bytes=one.bytes * passes)


def backward_passes(name: str) -> float:
    """Traffic of a vector operator's gradient relative to its own; 0: it has none to compute."""
    merged = ((f"{MERGE}{form}", passes) for form, passes in MERGE_PASSES.items())
    for residual, (forward, backward) in ((WIDE, WIDE_PASSES), (RESIDUAL, RESIDUAL_PASSES), *merged):
        if name.endswith(residual):
            return backward / forward  # the sum of two gradients; a dropout's mask is read again
    if name.endswith((*OF_MASK, MASKED)):
        return 0.0
    if name.endswith((*OF_RESULTS, "softmax.cast")):
        return 1.0
    return NORM_PASSES[1] / NORM_PASSES[0] if name.endswith("norm") else 1.5


def repeated_work(forward: Work, layer: LayerAssignment, repeat_exchanges: bool = True) -> Work:
    """What the backward pass computes again of ``forward``.

    A whole layer but for what is excluded, or what a pattern selects; exchanges that the patterns of their own key select.
    Matrices made of codes and masks of dropout, whatever is recomputed.
    """
    return tuple(one for one in forward if _repeated(one, layer, repeat_exchanges))


def _repeated(one: Operator | Exchange, layer: LayerAssignment, repeat_exchanges: bool) -> bool:
    key = "select_recompute" if isinstance(one, Operator) else "select_comm_recompute"
    if one.name.endswith((HELD, *DRAWN_AGAIN)):
        return not _named(one.name, layer.applied(f"{key}_exclude"))
    if one.name.endswith(OF_NUMBERS):
        return False
    # A pattern names an operator and stands for the exchanges next to it: that of a norm for the gather of its result.
    operator = one.name if isinstance(one, Operator) else one.name.replace("_norm.gather", "_norm.norm")
    if layer.recompute:
        excluded = _named(operator, layer.applied(f"{key}_exclude"))
        return not excluded and (repeat_exchanges or isinstance(one, Operator) or _is_of_model(one))
    if isinstance(one, Exchange) and one.op != "AllGather":
        return False  # the result of a product is kept: only the gather of its operand is repeated
    return _named(operator, layer.applied(key))


def _is_of_model(one: Exchange) -> bool:
    """Whether the model itself exchanges, whose operators are repeated like others, and not the compiler between two of them."""
    if one.op == ROUND:
        return True
    return one.name.startswith(SORTED_TOKENS) and one.axis == "ep" and one.op != "ReduceScatter"


def pattern_matches(forward: Work, layer: LayerAssignment) -> dict[tuple[str, str], bool]:
    """Keys and patterns that choose operators of the layer to repeat or to keep, and whether one in ``forward`` is named.

    What plain counts stand for names parts that some layers do not have, and is not among them.
    """
    key = SELECTING[layer.recompute]
    if layer.is_default(key):
        return {}
    names = [one.name for one in forward if isinstance(one, Operator)]
    return {(key, each): any(names_operator(each, name) for name in names) for each in layer.applied(key)}


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(names_operator(pattern, name) for pattern in patterns)
