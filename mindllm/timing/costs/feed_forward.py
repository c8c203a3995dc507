"""The operators of a feed-forward on one rank, dense or a mixture of experts, forward, from normed hidden states to its result.

Experts compute in static shapes, as the model does (``mindllm/models/experts/experts.py``): every one has as many places as the
capacity says, whether tokens want them or not. So how evenly a router spreads its tokens costs no time here; it costs tokens.
Experts of sorted tokens (``models/experts/grouped_experts.py``) compute what is chosen: the time is that of a router that spreads
tokens evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.parts import FeedForwardSpec
from mindllm.axes import CONTEXT
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES, Axis, Exchange, Operator, elementwise, product
from mindllm.timing.workload import Numerics, Strategy

ROUTER = "float32"
ROUTED_PASSES = 14.0
"""Tensors of [tokens, experts] in single precision that routing reads and writes: scores, choice, mask, places, load, balance."""
COUNTS, NUMBERS = ".experts.counts", ".experts.numbers"
"""End the names of exchanges of how many rows are sent, and of which experts they are."""
OF_NUMBERS = (COUNTS, NUMBERS)
"""They have no gradient, and are kept where others are repeated."""
COLLECTED_PASSES = 5.0  # of the chosen experts' results: gathered, weighed, added up


def sorts_split_tokens(spec: FeedForwardSpec | ExpertsSpec) -> bool:
    """Whether it takes tokens as they are split between layers, so that they need not be gathered."""
    return isinstance(spec, ExpertsSpec) and spec.grouped and spec.shared is None


def sends_tokens(spec: FeedForwardSpec | ExpertsSpec, strategy: Strategy) -> bool:
    """Whether ranks send each other sorted tokens, as many as the router decides."""
    return isinstance(spec, ExpertsSpec) and spec.sends and strategy.expert_parallel > 1


def feed_forward_work(
    spec: FeedForwardSpec, tokens: float, strategy: Strategy, numerics: Numerics, at: str = "feed_forward"
) -> Iterator[Operator]:
    """A dense one: its width is split over tensor-parallel ranks."""
    width = spec.intermediate_size / strategy.model_parallel
    inner = HALF_BYTES * tokens * width
    yield product(f"{at}.w1.matmul", tokens, spec.hidden_size, width, numerics.compute)
    yield elementwise(f"{at}.w1.activation.{spec.activation_operator}", inner, 2.0)
    if spec.gated:
        yield product(f"{at}.w3.matmul", tokens, spec.hidden_size, width, numerics.compute)
        yield elementwise(f"{at}.mul", inner, 3.0)
    yield product(f"{at}.w2.matmul", tokens, width, spec.hidden_size, numerics.compute)


def experts_work(
    spec: ExpertsSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator | Exchange]:
    """Router, places, the way to the experts, their products, the way back, the weighted sum, and a shared expert."""
    at, router, hidden = "feed_forward", spec.router, spec.hidden_size
    if spec.grouped:
        yield from _sorted_work(spec, tokens, strategy, numerics)
        yield from _seen_by_all(spec, tokens, strategy, numerics)
        return
    rows = HALF_BYTES * routed_places(spec, tokens, seq_length) * hidden
    own = rows * strategy.expert_tensor_parallel / strategy.model_parallel
    yield product(f"{at}.router.matmul", tokens / strategy.sequence_ranks, hidden, router.experts, ROUTER)
    passes = ROUTED_PASSES + 2 * router.top_k  # the mask is made of a row of zeros and a one for every choice
    yield elementwise(f"{at}.router.scores", FP32_BYTES * tokens * router.experts, passes)
    away: Axis = "ep"
    if strategy.shares_sequences:  # whole sequences are routed, and every rank of one takes its experts' places of them
        away = "ep over cp"
        yield Exchange(
            f"{at}.sequence.gather", "AllGather", HALF_BYTES * tokens * strategy.size(CONTEXT) * hidden, "cp"
        )
    yield elementwise(f"{at}.gather_tokens", rows, 2.0)
    yield Exchange(f"{at}.depart", "AlltoAll", own, away)
    yield from _products(spec, tokens, seq_length, strategy, numerics)
    yield Exchange(f"{at}.experts.reduce", "AllReduce", own, "etp")
    yield Exchange(f"{at}.arrive", "AlltoAll", own, away)
    if strategy.shares_sequences:
        yield Exchange(f"{at}.results.gather", "AllGather", own * strategy.size(CONTEXT), "cp")
    if strategy.expert_tensor_parallel < strategy.model_parallel:
        yield Exchange(f"{at}.arrive.gather", "AllGather", rows)
    yield elementwise(f"{at}.collect", HALF_BYTES * tokens * router.top_k * hidden, COLLECTED_PASSES)
    yield from _seen_by_all(spec, tokens, strategy, numerics)


def _seen_by_all(spec: ExpertsSpec, tokens: float, strategy: Strategy, numerics: Numerics) -> Iterator[Operator]:
    at, hidden = "feed_forward", spec.hidden_size
    if spec.shared is not None:
        yield from feed_forward_work(spec.shared, tokens, strategy, numerics, f"{at}.shared")
        yield elementwise(f"{at}.shared_add", HALF_BYTES * tokens * hidden, 3.0)
    if spec.shared_gate:
        yield product(f"{at}.shared_gate.matmul", tokens / strategy.sequence_ranks, hidden, 1, numerics.compute)
        yield elementwise(f"{at}.gate_mul", HALF_BYTES * tokens * hidden, 2.0)


def _sorted_work(
    spec: ExpertsSpec, tokens: float, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator | Exchange]:
    """Each device has its share of the tokens. Those that share experts gather theirs, and add up what they make of them; or send
    them, and what they make of them back.
    """
    at, router, hidden = "feed_forward", spec.router, spec.hidden_size
    share, groups = tokens / strategy.model_parallel, strategy.expert_parallel
    rows = HALF_BYTES * rows_held(spec, tokens, strategy) * hidden
    moved = HALF_BYTES * share * groups * hidden
    yield product(f"{at}.router.matmul", tokens / strategy.sequence_ranks, hidden, router.experts, ROUTER)
    yield elementwise(f"{at}.router.scores", FP32_BYTES * tokens * router.experts, ROUTED_PASSES + 2 * router.top_k)
    sends = sends_tokens(spec, strategy)
    if groups > 1 and not sends:
        yield Exchange(f"{at}.experts.gather_tokens", "AllGather", moved, "ep")
    yield elementwise(f"{at}.experts.permute", rows, 2.0)
    if sends:
        yield Exchange(f"{at}{COUNTS}", "AlltoAll", FP32_BYTES * router.experts, "ep")
        yield Exchange(f"{at}{NUMBERS}", "AlltoAllV", FP32_BYTES * rows_held(spec, tokens, strategy), "ep")
        yield Exchange(f"{at}.experts.send", "AlltoAllV", rows, "ep")
        yield elementwise(f"{at}.experts.sort_arrived", rows, 2.0)
    yield from _grouped_products(spec, tokens, strategy, numerics, sends)
    if sends:
        yield elementwise(f"{at}.experts.sort_back", rows, 2.0)
        yield Exchange(f"{at}.experts.send_back", "AlltoAllV", rows, "ep")
    yield elementwise(f"{at}.experts.unpermute", rows, 2.0)
    if groups > 1 and not sends:
        yield Exchange(f"{at}.experts.scatter", "ReduceScatter", moved, "ep")
    if strategy.model_parallel > 1 and not strategy.sequence_parallel:
        yield Exchange(f"{at}.experts.results", "AllGather", HALF_BYTES * tokens * hidden)


def _grouped_products(
    spec: ExpertsSpec, tokens: float, strategy: Strategy, numerics: Numerics, joined: bool
) -> Iterator[Operator]:
    """Products of the chosen rows. ``joined``: those of both projections up are one, and a fused operator takes it apart."""
    at, hidden, width = "feed_forward.experts", spec.hidden_size, spec.expert.intermediate_size
    own = spec.router.experts / strategy.expert_parallel
    computed = tokens / strategy.model_parallel * spec.router.top_k
    inner = HALF_BYTES * rows_held(spec, tokens, strategy) * width
    if joined:
        computed = rows_held(spec, tokens, strategy)
        yield elementwise(f"{at}.join", HALF_BYTES * own * hidden * 2 * width, 2.0)
    up = {"w1": (hidden, 2 * width)} if joined else {"w1": (hidden, width), "w3": (hidden, width)}
    for name, (rows, columns) in {**up, "w2": (width, hidden)}.items():
        if name == "w2":
            if not joined:
                yield elementwise(f"{at}.activation.{spec.expert.activation_operator}", inner, 2.0)
            yield elementwise(f"{at}.mul", inner, 3.0)
        yield elementwise(f"{at}.{name}.transpose", HALF_BYTES * own * rows * columns, 2.0)
        yield product(f"{at}.{name}.matmul", computed / own, rows, columns, numerics.compute, own)


def rows_held(spec: ExpertsSpec, tokens: float, strategy: Strategy) -> float:
    """Rows of sorted tokens that a rank has room for, when each of its replicas has ``tokens`` tokens: whatever may come. Where
    they are sent, those that come if the router spreads them evenly, and the rows of zeros that are sent to every rank.
    """
    share, groups = tokens / strategy.model_parallel, strategy.expert_parallel
    if sends_tokens(spec, strategy):
        return (share + math.ceil(groups / spec.router.top_k)) * spec.router.top_k
    return share * groups * spec.router.top_k


def _products(
    spec: ExpertsSpec, tokens: float, seq_length: int, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator]:
    """One product for every expert a rank has and sequence that comes to it; the width is split over an expert's ranks."""
    at, expert, capacity = "feed_forward.experts", spec.expert, spec.capacity(seq_length)
    places = own_places(spec, tokens, seq_length, strategy)
    count, width = places / capacity, expert.intermediate_size / strategy.expert_tensor_parallel
    for name in ("w1", "w3"):
        yield product(f"{at}.{name}.matmul", capacity, expert.hidden_size, width, numerics.compute, count)
    yield elementwise(f"{at}.activation.{expert.activation_operator}", HALF_BYTES * places * width, 2.0)
    yield elementwise(f"{at}.mul", HALF_BYTES * places * width, 3.0)
    yield product(f"{at}.w2.matmul", capacity, width, expert.hidden_size, numerics.compute, count)


def routed_places(spec: ExpertsSpec, tokens: float, seq_length: int) -> float:
    """Places that the tokens of a replica are put in, over all experts."""
    return tokens / seq_length * spec.router.experts * spec.capacity(seq_length)


def own_places(spec: ExpertsSpec, tokens: float, seq_length: int, strategy: Strategy) -> float:
    """Places that a rank computes, when each of its replicas has ``tokens`` tokens."""
    return routed_places(spec, tokens, seq_length) * strategy.expert_tensor_parallel / strategy.model_parallel
