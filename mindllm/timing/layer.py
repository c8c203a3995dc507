"""The operators of a decoder layer on one rank, forward, backward, and what recomputation repeats.

Shapes follow Megatron-LM's split (Shoeybi et al., 2019; sequence parallel: Korthikanti et al., 2022): the query, key, value and
first feed-forward products by columns, the other two by rows. Traffic counts every tensor that a fused kernel reads or writes
once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache

from mindllm.config.layers import AttentionSpec, FeedForwardSpec, LayerSpec, RotarySpec
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.timing.work import ATTENTION, HALF, Exchange, Operator, Work, elementwise, product
from mindllm.timing.workload import Numerics, Strategy

SPLIT_INPUT = ("wo", "w2")  # projections whose input tensor parallelism splits; it splits the output of the others
CAUSAL = 0.5  # of the scores, which a fused kernel leaves out
FLASH_BACKWARD = 2.5  # five products instead of two (Dao, 2023, section 3.1)
NORM_PASSES = (2.0, 4.0)  # tensors that a norm reads and writes, forward and backward
MASK = 0.5  # of a half-precision tensor: a dropout mask of a byte for each number


def dense(spec: LayerSpec) -> FeedForwardSpec:
    """The feed-forward of a layer.

    Raises:
        UserError: it is a mixture of experts, whose time and memory are not modelled.
    """
    if not isinstance(spec.feed_forward, FeedForwardSpec):
        raise UserError("a layer has experts, whose time is not modelled; only dense layers are predicted")
    return spec.feed_forward


def ordinary(spec: LayerSpec) -> AttentionSpec:
    """The attention of a layer.

    Raises:
        UserError: it is latent attention, whose time is not modelled.
    """
    if not isinstance(spec.attention, AttentionSpec):
        raise UserError(
            "a layer has latent attention, whose time is not modelled; only ordinary attention is predicted"
        )
    return spec.attention


def forward_work(spec: LayerSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics) -> Work:
    """One micro-batch of ``tokens`` tokens through a layer."""
    return tuple(_forward(spec, tokens, seq_length, strategy, numerics))


def _forward(
    spec: LayerSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator | Exchange]:
    hidden = HALF * tokens * spec.attention.hidden_size
    outside = hidden / (strategy.model_parallel if strategy.sequence_parallel else 1)
    parts = (
        ("attention", spec.norms[0], attention_work(ordinary(spec), tokens, seq_length, strategy, numerics)),
        ("feed_forward", spec.norms[1], feed_forward_work(dense(spec), tokens, strategy, numerics)),
    )
    for part, norm, inside in parts:
        yield elementwise(f"{norm}.norm", outside, NORM_PASSES[0])
        if strategy.sequence_parallel:
            yield Exchange(f"{norm}.gather", "AllGather", hidden)
        yield from inside
        yield from adapter_work(spec, part, tokens, strategy, numerics)
        yield Exchange(f"{part}.reduce", "ReduceScatter" if strategy.sequence_parallel else "AllReduce", hidden)
        yield from bottleneck_work(spec, part, tokens, strategy, numerics)
        if spec.norm_output:
            yield elementwise(f"{part}_post_norm.norm", outside, NORM_PASSES[0])
        yield elementwise(f"{part}.residual", outside, 3 + MASK * numerics.dropout)


def attention_work(
    spec: AttentionSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    """From normed hidden states to the output projection."""
    ranks = strategy.model_parallel
    for name in ("wq", "wk", "wv"):
        out, inner = spec.matrices()[f"{name}.weight"]
        yield product(f"attention.{name}.matmul", tokens, inner, out / ranks, numerics.compute)
    heads, width = spec.num_heads / ranks, spec.num_heads * spec.head_dim / ranks
    keys = spec.kv_heads * spec.head_dim / ranks
    if isinstance(spec.position, RotarySpec):
        yield elementwise("attention.apply_rotary", HALF * tokens * (width + keys), 2.0)
    yield from score_work(spec, tokens, seq_length, heads, numerics)
    yield product("attention.wo.matmul", tokens, width, spec.hidden_size, numerics.compute)


def score_work(
    spec: AttentionSpec, tokens: float, seq_length: int, heads: float, numerics: Numerics
) -> Iterator[Operator]:
    """Scores, softmax and their product with the values: one fused kernel, or five."""
    seen = min(seq_length, spec.window or seq_length)
    if numerics.fused_attention and spec.can_be_fused:
        flops = 4.0 * tokens * seen * heads * spec.head_dim * CAUSAL
        traffic = HALF * tokens * spec.head_dim * (2 * heads + 2 * heads * spec.kv_heads / spec.num_heads)
        yield Operator("attention.flash_attention", ATTENTION, flops, traffic, dtype=numerics.compute)
        return
    batch = tokens / seq_length * heads
    scores = HALF * batch * seq_length * seq_length
    yield product("attention.scores", seq_length, spec.head_dim, seq_length, numerics.compute, batch)
    yield elementwise("attention.softmax", scores, 2.0)
    if numerics.dropout:
        yield elementwise("attention.dropout", scores, 2 + MASK)
    yield product("attention.context", seq_length, seq_length, spec.head_dim, numerics.compute, batch)


def feed_forward_work(
    spec: FeedForwardSpec, tokens: float, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    """From normed hidden states to the second projection."""
    width = spec.width / strategy.model_parallel
    inner = HALF * tokens * width
    yield product("feed_forward.w1.matmul", tokens, spec.hidden_size, width, numerics.compute)
    yield elementwise(f"feed_forward.w1.activation.{spec.activation}", inner, 2.0)
    if spec.gated:
        yield product("feed_forward.w3.matmul", tokens, spec.hidden_size, width, numerics.compute)
        yield elementwise("feed_forward.mul", inner, 3.0)
    yield product("feed_forward.w2.matmul", tokens, width, spec.hidden_size, numerics.compute)


def adapter_work(
    spec: LayerSpec, part: str, tokens: float, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    """Both products of the adapters of one part, and the sums; the narrow side is whole on every rank.

    Raises:
        UserError: adapters have lengths of rows (DoRA), whose time is not modelled.
    """
    ranks = strategy.model_parallel
    for adapter in spec.adapters:
        if not adapter.module.startswith(f"{part}."):
            continue
        if adapter.dora:
            raise UserError("a layer has adapters with use_dora, whose time is not modelled; only LoRA is predicted")
        split_input = adapter.module.rpartition(".")[2] in SPLIT_INPUT
        inner = adapter.in_features / (ranks if split_input else 1)
        out = adapter.out_features / (1 if split_input else ranks)
        yield product(f"{adapter.module}.adapter.down", tokens, inner, adapter.rank, numerics.compute)
        yield product(f"{adapter.module}.adapter.up", tokens, adapter.rank, out, numerics.compute)
        yield elementwise(f"{adapter.module}.adapter.add", HALF * tokens * out, 3.0)


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
        yield elementwise(f"{name}.gelu", HALF * own * length, 4.0)
        yield product(f"{name}.up.matmul", own, length, hidden, numerics.compute)
        yield elementwise(f"{name}.add", HALF * own * hidden, 4.0)


MIRRORED: Mapping[str, str] = {"AllGather": "ReduceScatter", "ReduceScatter": "AllGather"}


def backward_work(forward: Work, frozen: Collection[str] = ()) -> Work:
    """Gradients of ``forward``, in the opposite order; those of weights that are not ``frozen`` are among them."""
    return tuple(gradient for one in reversed(forward) for gradient in _gradients(one, frozen))


def _gradients(one: Operator | Exchange, frozen: Collection[str]) -> Iterator[Operator | Exchange]:
    if isinstance(one, Exchange):
        yield Exchange(one.name, MIRRORED.get(one.op, one.op), one.bytes, one.axis)
    elif one.sizes:
        rows, inner, columns = one.sizes
        batch = one.flops / (2 * rows * inner * columns)
        yield product(one.name, rows, columns, inner, one.dtype, batch)
        if f"{one.name.removesuffix('.matmul')}.weight" not in frozen:
            yield product(f"{one.name}.weight", inner, rows, columns, one.dtype, batch)
    elif one.kind == ATTENTION:
        yield Operator(one.name, ATTENTION, one.flops * FLASH_BACKWARD, one.bytes * 2, dtype=one.dtype)
    else:
        yield Operator(one.name, one.kind, bytes=one.bytes * backward_passes(one.name))


def backward_passes(name: str) -> float:
    """Traffic of a vector operator's gradient relative to its own."""
    if name.endswith("residual"):
        return 0.5  # the sum of two gradients; a dropout's mask is read again
    return NORM_PASSES[1] / NORM_PASSES[0] if name.endswith("norm") else 1.5


def repeated_work(forward: Work, layer: LayerAssignment, repeat_exchanges: bool = True) -> Work:
    """What the backward pass computes again of ``forward``.

    A whole layer but for what is excluded, or what a pattern selects; exchanges that the patterns of their own key select.
    """
    return tuple(one for one in forward if _repeated(one, layer, repeat_exchanges))


def _repeated(one: Operator | Exchange, layer: LayerAssignment, repeat_exchanges: bool) -> bool:
    key = "select_recompute" if isinstance(one, Operator) else "select_comm_recompute"
    if layer.recompute:
        excluded = _named(one.name, layer.applied(f"{key}_exclude"))
        return not excluded and (repeat_exchanges or isinstance(one, Operator))
    if isinstance(one, Exchange) and one.op != "AllGather":
        return False  # what a product of rows yields is kept: only what gathers its operand is repeated
    return _named(one.name, layer.applied(key))


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(_matches(pattern, name) for pattern in patterns)


@lru_cache(maxsize=1024)
def _matches(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None
