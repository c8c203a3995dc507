"""The operators of attention on one rank, forward, from normed hidden states to the output projection.

Heads are split over tensor-parallel ranks. What latent attention has besides heads, its narrow vectors, is whole on each.
Ranks of a sequence have a part of its tokens; for scores they gather its keys and values, pass them on from one to the next, or
exchange tokens for heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.parts import AlibiSpec, AttentionSpec, LatentAttentionSpec, RotarySpec, causal_blocks
from mindllm.axes import CONTEXT
from mindllm.timing.costs.dropout import dropout_work
from mindllm.timing.costs.exchanges import ROUND
from mindllm.timing.costs.work import (
    ATTENTION,
    HALF_BYTES,
    NORM_PASSES,
    Exchange,
    Operator,
    elementwise,
    product,
    size_of,
)
from mindllm.timing.workload import Numerics, Strategy

SOFTMAX_PASSES = 2.0  # tensors that a softmax reads and writes of its scores
MASKED = "softmax.mask"  # ends the name of a sum of scores and mask, which has no gradient to compute
CPU_PASSES = (14.0, 8.0)
"""Tensors in half precision of mask, softmax and casts on a CPU, whose constants are fitted with these; the second figure is
of scores in single precision."""
MERGE, MERGE_PASSES = "attention.attention.merge", {"": (19.0, 8.0), "_halves": (30.0, 20.0)}
"""What merges a further block of keys: tensors as large as the queries in half precision, read and written forward and backward.
Forward the queries are (2); a context is made single precision (3), two are weighed (8) and added (6). Backward queries and
gradients are (4), and the gradients of queries, and of fewer keys, are added (4). In balanced halves three pieces are merged
instead of two, and pieces are chosen out of two."""
OF_HEADS = ("wq_plain", "wq_rotary", "wq_up_plain", "wq_up_rotary", "wk_plain", "wv")
"""Projections of latent attention that heads are made by; the others make what all heads share."""


def attention_work(
    spec: AttentionSpec | LatentAttentionSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator | Exchange]:
    """One micro-batch, of which the rank has ``tokens`` tokens, in sequences of ``seq_length``."""
    heads = spec.num_heads / strategy.model_parallel
    if isinstance(spec, LatentAttentionSpec):
        yield from _latent_projections(spec, tokens, heads, strategy, numerics)
    else:
        yield from _projections(spec, tokens, strategy, numerics)
    given, yielded = _context_exchanges(spec, tokens, seq_length, strategy, numerics)
    yield from given
    yield from _scores(spec, tokens, seq_length, strategy, numerics)
    yield from yielded
    yield product("attention.wo.matmul", tokens, heads * spec.value_dim, spec.hidden_size, numerics.compute)


def _projections(spec: AttentionSpec, tokens: float, strategy: Strategy, numerics: Numerics) -> Iterator[Operator]:
    ranks = strategy.model_parallel
    for name in ("wq", "wk", "wv"):
        out, inner = spec.matrices()[f"{name}.weight"]
        yield product(f"attention.{name}.matmul", tokens, inner, out / ranks, numerics.compute)
    if isinstance(spec.position, RotarySpec):
        turned = (spec.num_heads + spec.num_kv_heads) * spec.head_dim / ranks
        yield elementwise("attention.apply_rotary", HALF_BYTES * tokens * turned, 2.0)


def _latent_projections(
    spec: LatentAttentionSpec, tokens: float, heads: float, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    for name, (out, inner) in spec.matrices().items():
        projection = name.removesuffix(".weight")
        if projection != "wo":
            columns = out / strategy.model_parallel if projection in OF_HEADS else out
            yield product(f"attention.{projection}.matmul", tokens, inner, columns, numerics.compute)
    for side, width in (("query", spec.q_lora_rank), ("key_value", spec.kv_lora_rank)):
        if width is not None:
            yield elementwise(f"attention.{side}_latent_norm.norm", HALF_BYTES * tokens * width, NORM_PASSES[0])
    yield elementwise("attention.query_rotary", HALF_BYTES * tokens * heads * spec.qk_rope_head_dim, 2.0)
    yield elementwise("attention.key_rotary", HALF_BYTES * tokens * spec.qk_rope_head_dim, 2.0)
    for side in ("query", "key"):
        yield elementwise(f"attention.join_{side}", HALF_BYTES * tokens * heads * spec.head_dim, 2.0)
    if in_one_kernel(spec, numerics) and spec.value_dim < spec.head_dim:
        yield elementwise("attention.padding", HALF_BYTES * tokens * heads * spec.head_dim, 2.0)
        yield elementwise("attention.cut", HALF_BYTES * tokens * heads * spec.value_dim, 2.0)


def _context_exchanges(
    spec: AttentionSpec | LatentAttentionSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> tuple[list[Exchange], list[Exchange]]:
    """What ranks of a sequence exchange before scores, and behind them.

    Tokens of several sequences are split as one row of tokens, sequences by their parts: queries, keys, values and results go
    from one layout to the other, and back. Values for a kernel that wants them as wide as keys are padded before they are
    gathered.
    """
    if not strategy.shares_sequences:
        return [], []
    heads, ranks = spec.num_heads / strategy.model_parallel, strategy.size(CONTEXT)
    queries, results = (HALF_BYTES * tokens * heads * width for width in (spec.head_dim, spec.value_dim))
    shared = spec.num_kv_heads / spec.num_heads
    values = queries if in_one_kernel(spec, numerics) else results
    before = {"queries": queries, "keys": queries * shared, "values": values * shared}
    laid_out: list[Exchange] = []
    if tokens * ranks > seq_length:
        narrow = {**before, "values": results * shared}
        if isinstance(spec, LatentAttentionSpec):  # the turned part of keys is one for all heads
            of_keys = heads * (spec.head_dim - spec.qk_rope_head_dim) + spec.qk_rope_head_dim
            narrow["keys"] = HALF_BYTES * tokens * of_keys
        laid_out = [Exchange(f"attention.{name}.layout", "AlltoAll", size, "cp") for name, size in narrow.items()]
    behind = [Exchange("attention.results.layout", "AlltoAll", results, "cp")] * bool(laid_out)
    if strategy.passes_keys:
        return [*laid_out, Exchange("attention.keys.round", ROUND, before["keys"] + before["values"], "cp")], behind
    if not strategy.exchanges_heads:
        gathered = [
            Exchange(f"attention.{name}.gather", "AllGather", ranks * before[name], "cp") for name in ("keys", "values")
        ]
        return laid_out + gathered, behind
    exchanged = [Exchange(f"attention.{name}.exchange", "AlltoAll", size, "cp") for name, size in before.items()]
    return laid_out + exchanged, [Exchange("attention.results.exchange", "AlltoAll", results, "cp"), *behind]


def _scores(
    spec: AttentionSpec | LatentAttentionSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    """Scores, softmax and their product with the values: one fused kernel, in which values are as wide as keys, or five.

    Ranks of a sequence have the queries of their part and all keys, or some heads of the whole sequence.
    """
    heads, ranks = spec.num_heads / strategy.model_parallel, strategy.size(CONTEXT)
    queries = seq_length / (1 if strategy.exchanges_heads else ranks)
    if strategy.exchanges_heads:
        heads, tokens = heads / ranks, tokens * ranks
    sequences = tokens / queries
    if in_one_kernel(spec, numerics):
        first = (
            0.0 if strategy.context_balanced else seq_length - queries
        )  # the last rank takes longest, others wait for it
        seen = seq_length if numerics.whole_masks else seen_keys(seq_length, spec.window, first)
        blocks = ranks if strategy.passes_keys else 1
        rows = 2 * tokens * blocks + 2 * sequences * seq_length * spec.num_kv_heads / spec.num_heads
        flops, traffic = 4.0 * tokens * seen * heads * spec.head_dim, HALF_BYTES * rows * heads * spec.head_dim
        masked = tokens * seen * heads if numerics.whole_masks or numerics.reads_masks else 0.0
        traffic += HALF_BYTES * tokens * seen * heads * _is_biased_alone(spec)
        name = "attention.attention.flash_attention"
        yield Operator(name, ATTENTION, flops, traffic, dtype=numerics.compute, head=spec.head_dim, masked=masked)
        if strategy.passes_keys:
            form = "_halves" if strategy.context_balanced else ""
            size = HALF_BYTES * tokens * heads * spec.head_dim
            yield elementwise(f"{MERGE}{form}", size * (ranks - 1), MERGE_PASSES[form][0])
        return
    batch, keys = sequences * heads, seq_length * (computed_keys(seq_length) if numerics.causal_blocks else 1.0)
    scores = HALF_BYTES * batch * queries * keys
    yield product("attention.scores", queries, spec.head_dim, keys, numerics.compute, batch)
    yield from _softmax(scores, numerics)
    if spec.dropout:
        yield from dropout_work("attention.dropout", scores, numerics)
    yield product("attention.context", queries, keys, spec.value_dim, numerics.compute, batch)


def _softmax(scores: float, numerics: Numerics) -> Iterator[Operator]:
    """Mask and softmax of ``scores`` bytes in half precision: one kernel; or in MindSpore's graph casts to the softmax's type and
    back, where it is another, and a kernel each for mask and softmax.
    """
    if not numerics.plain_softmax:
        yield elementwise("attention.softmax", scores, SOFTMAX_PASSES)
        return
    if numerics.causal_blocks:
        yield elementwise("attention.softmax", scores, CPU_PASSES[numerics.compute == "float32"])
        return
    computed, normalised = (size_of(dtype) / HALF_BYTES for dtype in (numerics.compute, numerics.softmax))
    casts = [computed + normalised] * (numerics.compute != numerics.softmax)
    yield from (elementwise("attention.softmax.cast", scores, passes) for passes in casts)
    yield elementwise(f"attention.{MASKED}", scores, 2 * normalised)
    yield elementwise("attention.softmax", scores, SOFTMAX_PASSES * normalised)
    yield from (elementwise("attention.softmax.cast", scores, passes) for passes in casts)


def computed_keys(length: float) -> float:
    """The share of all scores that a CPU computes under a causal mask, in up to four blocks of rows (``models/attention``)."""
    blocks = causal_blocks(int(length))
    return (blocks + 1) / (2 * blocks)


def seen_keys(length: float, window: float | None = None, first: float = 0.0) -> float:
    """Keys that queries from ``first`` to the end of a sequence see, their mean: those before them, at most ``window``."""
    window = min(length, window or length)

    def before(position: float) -> float:  # the integral of min(query, window)
        return position**2 / 2 if position <= window else window**2 / 2 + window * (position - window)

    return (before(length) - before(first)) / (length - first)


def in_one_kernel(spec: AttentionSpec | LatentAttentionSpec, numerics: Numerics) -> bool:
    """Whether scores, softmax and context are one kernel."""
    return numerics.fused_attention and (spec.can_be_fused or (numerics.takes_bias and _is_biased_alone(spec)))


def _is_biased_alone(spec: AttentionSpec | LatentAttentionSpec) -> bool:
    """Whether ALiBi's bias is all that keeps attention from the fused kernel."""
    if not isinstance(spec, AttentionSpec) or not isinstance(spec.position, AlibiSpec):
        return False
    return spec.soft_cap is None and not spec.dropout
