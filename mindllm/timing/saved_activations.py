"""What a micro-batch keeps of a layer for its backward pass, by the operator that yields it.

Inputs of products, of norms and of activations are kept (Korthikanti et al., 2022, section 4), in the form that MindSpore's dry
run shows: norms read single precision, and of a sequence that is split products keep what was gathered. Results that
recomputation may repeat have the names of their operators; others (the residuals, what goes into attention's kernel) have names
of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import AttentionSpec, FeedForwardSpec, LatentAttentionSpec
from mindllm.axes import CONTEXT
from mindllm.timing.costs.dropout import mask_bytes
from mindllm.timing.costs.feed_forward import own_places, rows_held, sends_tokens, sorts_split_tokens
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES, size_of
from mindllm.timing.workload import Numerics, Strategy

ROUTED = 3  # tensors of [tokens, experts] in single precision: logits, scores, and scores as the losses see them
PARTS = ("attention", "feed_forward")
Kept = dict[str, float]


def kept_results(spec: LayerSpec, tokens: int, seq_length: int, strategy: Strategy, numerics: Numerics) -> Kept:
    """Bytes of each."""
    whole = HALF_BYTES * tokens * spec.attention.hidden_size
    hidden = whole / strategy.sequence_ranks
    found = {
        "residuals": numerics.forms.residual / HALF_BYTES * len(spec.norms) * hidden,
        **{f"{norm}.norm": hidden for norm in spec.norms[:2]},
    }
    for norm in spec.norms[: 1 if sorts_split_tokens(spec.feed_forward) else 2]:  # gathered, it is kept instead
        if strategy.sequence_parallel and numerics.forms.gathered:
            found[f"{norm}.gather"] = whole - hidden
    if spec.is_mtp:  # both operands of what joins them, the joint one, and what the last norm is given
        found["around_prediction"] = 5 * hidden
    if spec.dropout:
        found |= {f"{part}_dropout.cast": mask_bytes(numerics) / HALF_BYTES * hidden for part in PARTS}
    found |= _attention(spec, tokens, seq_length, strategy, numerics)
    if isinstance(spec.feed_forward, FeedForwardSpec):
        found |= _dense(spec.feed_forward, tokens, strategy, "feed_forward")
    else:
        found |= _experts(spec.feed_forward, tokens, seq_length, strategy)
        if numerics.forms.routed:
            found["feed_forward.router"] += FP32_BYTES * tokens * spec.attention.hidden_size / strategy.sequence_ranks
    for name in _read_for_no_gradient(spec):
        found.pop(name, None)
    for adapter in spec.adapters:
        if adapter.dropout:
            given = HALF_BYTES * tokens * adapter.rank_input(strategy.model_parallel)
            name = f"{adapter.module}.adapter.dropout"
            found |= {f"{name}.cast": mask_bytes(numerics) / HALF_BYTES * given, f"{name}.rescale": given}
    if numerics.forms.activation:
        return found
    return {name: size for name, size in found.items() if ".activation." not in name}


READ_BY = {
    ("attention_norm.norm", "attention_norm.gather"): tuple(
        f"attention.{name}" for name in ("wq", "wk", "wv", "wq_plain", "wq_rotary", "wq_down", "wkv_down", "wk_rotary")
    ),
    ("ffn_norm.norm", "ffn_norm.gather"): ("feed_forward.w1", "feed_forward.w3"),
    ("attention.context",): ("attention.wo",),
    ("feed_forward.mul",): ("feed_forward.w2",),
}
"""Results that are kept for gradients of weights alone, and the projections that read them."""


def _read_for_no_gradient(spec: LayerSpec) -> Iterator[str]:
    """Names of results that nobody keeps: their readers are frozen, without adapters or with some whose dropout keeps its own."""
    adapted = {adapter.module for adapter in spec.adapters if not adapter.dropout}
    weights = spec.weights()
    for results, readers in READ_BY.items():
        there = [reader for reader in readers if f"{reader}.weight" in weights]
        if there and all(f"{reader}.weight" in spec.frozen and reader not in adapted for reader in there):
            yield from results


def gradients_at_once(
    spec: LayerSpec,
    tokens: int,
    seq_length: int,
    strategy: Strategy,
    numerics: Numerics,
    of_weights: float = 0.0,
    again: bool = False,
) -> float:
    """Bytes of gradients at the fullest moment of a layer's backward pass, beside all that it kept.

    Those of all results of the feed-forward part, or ``of_weights``, what the gradients of its weights need; or those of scores
    and of their softmax, in its type, when the weights in half precision and all that was kept behind attention are gone.
    All are what dry runs show, of Llama 2, Gemma 2 and DeepSeek-V3. ``again``: the layer is computed again as a whole; then the
    last product's operand is not there yet when there are three gradients inside of the feed-forward part.
    """
    kept = kept_results(spec, tokens, seq_length, strategy, numerics)
    inside = _sum(kept, "feed_forward.")
    early = 2 * kept.get("feed_forward.mul", 0.0) if again and numerics.forms.casts else 0.0
    most = max(inside - early, of_weights)
    if numerics.forms.casts and isinstance(spec.feed_forward, ExpertsSpec) and not spec.feed_forward.grouped:
        hidden = HALF_BYTES * tokens * spec.attention.hidden_size / strategy.sequence_ranks
        most = _around_experts(kept, hidden, of_weights, strategy, again)
    elif numerics.forms.casts and again and isinstance(spec.feed_forward, ExpertsSpec):
        most = max(
            kept["feed_forward.collect"], of_weights
        )  # experts' own gradients come when the chosen results are gone
    if numerics.fused_attention and spec.attention.can_be_fused:
        return most
    behind = inside + _sum(kept, "ffn_norm.") + _sum(kept, "feed_forward_dropout.")
    behind += kept["residuals"] * (1 - 1 / len(spec.norms))  # but for what the first norm was given
    gradients = 2 * size_of(numerics.softmax) - _given_to_context(spec.attention, numerics)
    if spec.attention.dropout:  # its gradient, before and behind the mask, when what it yielded is gone
        gradients = max(gradients, size_of(numerics.compute))
    return max(most, gradients * _scores(spec, tokens, seq_length, strategy) - behind)


def _given_to_context(attention: AttentionSpec | LatentAttentionSpec, numerics: Numerics) -> float:
    """Bytes kept of a score between the softmax and the product with the values: what that is given, unless it is the softmax's
    own result, and the mask of a dropout.
    """
    given = size_of(numerics.compute)
    if attention.dropout:
        return given + mask_bytes(numerics)
    return given if numerics.compute != numerics.softmax else 0


def _around_experts(kept: Kept, hidden: float, of_weights: float, strategy: Strategy, again: bool) -> float:
    """The same of a feed-forward part whose experts have places by a capacity.

    First come the gradients of the weighted sum, of all chosen results and of what is sent to the experts, before and behind its
    exchange. Then those of the experts' weights, or of their last product's operand and of both its factors, when the operand is
    gone, beside the gradient of what they yield, which ranks of an expert add up on two more ways; what a shared expert kept is
    gone, and its gradient of ``hidden`` states twice there. Where the layer is computed again, its weighted sum is not yet: what
    experts yield waits for it, before and behind its exchange, and so does the gradient of all chosen results.
    """
    places, chosen, shared = (_sum(kept, f"feed_forward.{part}") for part in ("depart", "collect", "shared."))
    inside = max((3 - 1) * kept["feed_forward.experts.mul"], of_weights) - shared + (2 * hidden if shared else 0.0)
    inside += places * (3 if strategy.expert_tensor_parallel > 1 else 1)
    if again:
        return inside + places * (2 if strategy.expert_parallel > 1 else 1)
    return max(2 * places + 2 * chosen - shared, inside - chosen)


def _sum(kept: Kept, part: str) -> float:
    return sum(size for name, size in kept.items() if name.startswith(part))


def _scores(spec: LayerSpec, tokens: int, seq_length: int, strategy: Strategy) -> float:
    """How many a rank has."""
    return tokens * seq_length * spec.attention.num_heads / strategy.model_parallel


def _attention(spec: LayerSpec, tokens: int, seq_length: int, strategy: Strategy, numerics: Numerics) -> Kept:
    """Query, key, value and context of the rank's heads; narrow vectors; scores in the composed form.

    What the kernel yields is kept for its own gradient and, in another order, for the product behind it. Of a score the softmax
    is kept, what the product with the values is given, and what a soft cap yields. Ranks of a sequence keep the keys and values
    that they gathered, of a ring their own; with heads exchanged, the context before and behind that.
    """
    attention, ranks = spec.attention, strategy.model_parallel
    fused = numerics.fused_attention and attention.can_be_fused
    ordered = (
        numerics.forms.results - 1 if fused else 1
    )  # 0: the product behind the kernel reads the kernel's own result
    found: Kept = {}
    if isinstance(attention, LatentAttentionSpec):
        value = attention.head_dim if fused else attention.value_dim  # the kernel has values as wide as keys
        result = value if fused and ordered else 0  # of the kernel, for its own gradient
        padded = attention.value_dim * (
            numerics.forms.padded and value > attention.value_dim
        )  # what zeros are put behind
        result += attention.value_dim * (1 - ordered)
        heads = attention.num_heads * (2 * attention.head_dim + value + result + padded)
        narrow = attention.kv_lora_rank + (attention.q_lora_rank or 0)
        found["attention.latents"] = 2 * HALF_BYTES * tokens * narrow  # before and behind their norms
    else:
        exchanged = strategy.exchanges_heads or (
            strategy.context_balanced and not strategy.passes_keys
        )  # the kernel's results are put into another order
        gathered = 1 if strategy.exchanges_heads or strategy.passes_keys else strategy.size(CONTEXT)
        heads = (
            (1 + fused + exchanged) * attention.num_heads + 2 * gathered * attention.num_kv_heads
        ) * attention.head_dim
    found["attention.heads"] = HALF_BYTES * tokens * heads / ranks
    found["attention.context"] = HALF_BYTES * tokens * ordered * attention.num_heads * attention.value_dim / ranks
    if fused:
        found["attention.statistics"] = numerics.forms.statistics * tokens * attention.num_heads / ranks
    else:
        capped = attention.soft_cap is not None
        of_score = (1 + capped) * size_of(numerics.softmax) + _given_to_context(attention, numerics)
        found["attention.scores"] = of_score * _scores(spec, tokens, seq_length, strategy)
    return found


def _dense(spec: FeedForwardSpec, tokens: int, strategy: Strategy, at: str) -> Kept:
    inner = HALF_BYTES * tokens * spec.intermediate_size / strategy.model_parallel
    found = {f"{at}.w1": inner, f"{at}.w1.activation.{spec.activation_operator}": inner}
    return found | ({f"{at}.w3": inner, f"{at}.mul": inner} if spec.gated else {})


def _experts(spec: ExpertsSpec, tokens: int, seq_length: int, strategy: Strategy) -> Kept:
    """Of every place of a rank's experts, wanted or not; of every choice of a token, what its expert says."""
    at, places = "feed_forward.experts", own_places(spec, tokens, seq_length, strategy)
    if spec.grouped:
        places = rows_held(spec, tokens, strategy)
    inner = HALF_BYTES * places * spec.expert.intermediate_size / strategy.expert_tensor_parallel
    joined = sends_tokens(spec, strategy)
    activated = {f"{at}.activation.{spec.expert.activation_operator}": inner, f"{at}.w3": inner}
    found = {
        "feed_forward.router": ROUTED * FP32_BYTES * tokens * spec.router.experts,
        "feed_forward.depart": HALF_BYTES * places * spec.hidden_size,
        **({f"{at}.w1": 2 * inner} if joined else {f"{at}.w1": inner, **activated}),
        f"{at}.mul": inner,
        "feed_forward.collect": HALF_BYTES
        * (places if spec.grouped else tokens * spec.router.top_k)
        * spec.hidden_size,
    }
    return found if spec.shared is None else found | _dense(spec.shared, tokens, strategy, "feed_forward.shared")
