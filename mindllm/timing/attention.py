"""The operators of attention on one rank, forward, from normed hidden states to the output projection.

Heads are split over tensor-parallel ranks. What latent attention has besides heads, its narrow vectors, is whole on each.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.latent_attention import LatentAttentionSpec
from mindllm.config.layers import AttentionSpec, RotarySpec
from mindllm.timing.work import ATTENTION, HALF, MASK, NORM_PASSES, Operator, elementwise, product
from mindllm.timing.workload import Numerics, Strategy

CAUSAL = 0.5  # of the scores, which a fused kernel leaves out
OF_HEADS = ("wq_plain", "wq_rotary", "wq_up_plain", "wq_up_rotary", "wk_plain", "wv")
"""Projections of latent attention that heads are made by; the others make what all heads share."""


def attention_work(
    spec: AttentionSpec | LatentAttentionSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    """One micro-batch of ``tokens`` tokens in sequences of ``seq_length``."""
    heads = spec.num_heads / strategy.model_parallel
    if isinstance(spec, LatentAttentionSpec):
        yield from _latent_projections(spec, tokens, heads, strategy, numerics)
    else:
        yield from _projections(spec, tokens, strategy, numerics)
    yield from _scores(spec, tokens, seq_length, heads, numerics)
    yield product("attention.wo.matmul", tokens, heads * spec.value_dim, spec.hidden_size, numerics.compute)


def _projections(spec: AttentionSpec, tokens: float, strategy: Strategy, numerics: Numerics) -> Iterator[Operator]:
    ranks = strategy.model_parallel
    for name in ("wq", "wk", "wv"):
        out, inner = spec.matrices()[f"{name}.weight"]
        yield product(f"attention.{name}.matmul", tokens, inner, out / ranks, numerics.compute)
    if isinstance(spec.position, RotarySpec):
        turned = (spec.num_heads + spec.kv_heads) * spec.head_dim / ranks
        yield elementwise("attention.apply_rotary", HALF * tokens * turned, 2.0)


def _latent_projections(
    spec: LatentAttentionSpec, tokens: float, heads: float, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    for name, (out, inner) in spec.matrices().items():
        projection = name.removesuffix(".weight")
        if projection != "wo":
            columns = out / strategy.model_parallel if projection in OF_HEADS else out
            yield product(f"attention.{projection}.matmul", tokens, inner, columns, numerics.compute)
    for side, width in (("query", spec.query_rank), ("key_value", spec.key_value_rank)):
        if width is not None:
            yield elementwise(f"attention.{side}_latent_norm.norm", HALF * tokens * width, NORM_PASSES[0])
    yield elementwise("attention.query_rotary", HALF * tokens * heads * spec.rotary_dim, 2.0)
    yield elementwise("attention.key_rotary", HALF * tokens * spec.rotary_dim, 2.0)
    for side in ("query", "key"):
        yield elementwise(f"attention.join_{side}", HALF * tokens * heads * spec.head_dim, 2.0)
    if _fused(spec, numerics) and spec.value_dim < spec.head_dim:
        yield elementwise("attention.padding", HALF * tokens * heads * spec.head_dim, 2.0)
        yield elementwise("attention.cut", HALF * tokens * heads * spec.value_dim, 2.0)


def _scores(
    spec: AttentionSpec | LatentAttentionSpec, tokens: float, seq_length: int, heads: float, numerics: Numerics
) -> Iterator[Operator]:
    """Scores, softmax and their product with the values: one fused kernel, in which values are as wide as keys, or five."""
    if _fused(spec, numerics):
        seen = min(seq_length, spec.window or seq_length)
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
    yield product("attention.context", seq_length, seq_length, spec.value_dim, numerics.compute, batch)


def _fused(spec: AttentionSpec | LatentAttentionSpec, numerics: Numerics) -> bool:
    return numerics.fused_attention and spec.can_be_fused
