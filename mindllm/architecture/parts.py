"""What a decoder layer is made of, as values: norm, position, attention, feed-forward.

Every part knows its own arithmetic: weights by name and shape (``[out, in]``), matrix products per token.

Multi-head latent attention (DeepSeek-V2, section 2.1) has keys and values from a narrow vector per token. A head's query and
key are a plain part, and a part that rotary positions turn; the latter of the key is one for all heads.

Rotary positions are stretched to longer contexts than a model was trained on in several ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shapes = dict[str, tuple[int, ...]]
Activation = Literal["silu", "gelu_tanh", "quick_gelu"]
ACTIVATION_OPERATORS: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu", "quick_gelu": "quick_gelu"}
"""The operators that compute them, by the names that patterns of ``recompute_config`` see."""
SPLIT_INPUT = ("wo", "w2")  # projections whose input tensor parallelism splits; it splits the output of the others
GRADIENT = 2.0  # those of the product that yields the gradient of a weight
FORWARD_AND_BACKWARD = 6.0  # floating-point operations per weight of a matrix product and token: 2 forward, 4 backward


def scalars(shapes: Shapes) -> int:
    """Return the number of elements in weights of these shapes."""
    return sum(map(math.prod, shapes.values()))


@dataclass(frozen=True)
class NormSpec:
    """A norm. ``rms``: root mean square (Zhang & Sennrich, 2019); ``rms_one``: RMS norm that multiplies by 1 + weight (Gemma).

    ``layer``: LayerNorm with a bias (Ba et al., 2016).
    """

    kind: Literal["rms", "rms_one", "layer"]
    eps: float

    def weights(self, width: int) -> Shapes:
        """Return names and shapes for a norm over ``width`` channels."""
        return {"weight": (width,), **({"bias": (width,)} if self.kind == "layer" else {})}


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions (Su et al., 2021) on the first ``rotary_dim`` channels of a head, with an optional ``scaling``.

    ``max_position`` is the context that the scaling is relative to, unless it has one.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    max_position: int = 0


@dataclass(frozen=True)
class AlibiSpec:
    """A slope per head times the distance of query and key, added to the scores (Press et al., 2022)."""


Position = RotarySpec | AlibiSpec | None
"""What attention does about positions; None: nothing, they are learned and added to the embeddings, or not there."""


SMALLEST_BLOCK, MOST_BLOCKS = 128, 4


def causal_blocks(length: int) -> int:
    """Return the number of query blocks in which a CPU computes causal attention: each block reads the keys up to its end.

    Slices of keys and values cost less than they save as long as blocks are large, hence at most four.
    """
    return min(MOST_BLOCKS, max(1, length // SMALLEST_BLOCK))


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped queries (Ainslie et al., 2023).

    ``window``: keys that a query sees, itself included (None: all before it). ``scale`` multiplies the scores, ``soft_cap``
    bounds them by ``cap · tanh(score / cap)``; ``query_key_norm`` is applied to every head of queries and keys. With
    the probability ``dropout`` a query does not see a key in training.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    position: Position
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    soft_cap: float | None = None
    query_key_norm: NormSpec | None = None
    dropout: float = 0.0

    @property
    def context(self) -> AttentionContext:
        """Return the tables and masks that this attention reads."""
        return AttentionContext(self.position, self.window, self.head_dim, self.num_heads)

    @property
    def value_dim(self) -> int:
        """Return the channels of a value head."""
        return self.head_dim

    @property
    def can_be_fused(self) -> bool:
        """Return True if the fused kernel supports it. Soft caps, ALiBi and dropout are composed of operators."""
        return self.soft_cap is None and not isinstance(self.position, AlibiSpec) and not self.dropout

    def matrices(self) -> Shapes:
        """Return the weights of matrix products."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "wq.weight": (query, self.hidden_size),
            "wk.weight": (key_value, self.hidden_size),
            "wv.weight": (key_value, self.hidden_size),
            "wo.weight": (self.hidden_size, query),
        }

    def weights(self) -> Shapes:
        """Return all weights."""
        matrices = self.matrices()
        biased = ["wq", "wk", "wv"] * self.qkv_bias + ["wo"] * self.out_bias
        norms = {} if self.query_key_norm is None else self.query_key_norm.weights(self.head_dim)
        return {
            **matrices,
            **{f"{name}.bias": matrices[f"{name}.weight"][:1] for name in biased},
            **{f"{norm}.{name}": shape for norm in ("query_norm", "key_norm") for name, shape in norms.items()},
        }

    def flops_per_token(self, seq_length: int) -> float:
        """Return the FLOPs of forward and backward: weights and scores, not halved for the causal mask."""
        keys = min(seq_length, self.window or seq_length)
        return FORWARD_AND_BACKWARD * scalars(self.matrices()) + 12.0 * self.num_heads * self.head_dim * keys


@dataclass(frozen=True)
class AttentionContext:
    """What layers share that read the same tables of positions, ``head_dim`` wide, and the same mask."""

    position: Position
    window: int | None
    head_dim: int
    num_heads: int


@dataclass(frozen=True)
class FeedForwardSpec:
    """``w2(act(w1 x) · w3 x)`` if ``gated`` (Shazeer, 2020), else ``w2(act(w1 x))``; ``bias`` on all of them, ``out_bias`` on
    w2 alone.
    """

    hidden_size: int
    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    out_bias: bool = False

    @property
    def activation_operator(self) -> str:
        """Return the activation as patterns of ``recompute_config`` name it."""
        return ACTIVATION_OPERATORS[self.activation]

    def matrices(self) -> Shapes:
        """Return the weights of matrix products."""
        up = {"w1.weight": (self.intermediate_size, self.hidden_size)}
        gate = {"w3.weight": (self.intermediate_size, self.hidden_size)} if self.gated else {}
        return {**up, **gate, "w2.weight": (self.hidden_size, self.intermediate_size)}

    def weights(self) -> Shapes:
        """Return all weights."""
        matrices = self.matrices()
        biased = matrices if self.bias else ["w2.weight"] * self.out_bias
        return {**matrices, **{name.replace("weight", "bias"): matrices[name][:1] for name in biased}}

    @property
    def adds_to_loss(self) -> bool:
        """Return False: a dense feed-forward has no auxiliary loss."""
        return False

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward."""
        return FORWARD_AND_BACKWARD * scalars(self.matrices())

    def active_parameters(self) -> int:
        """Return the weights used per token: all."""
        return scalars(self.weights())


LATENT_NORM = NormSpec("rms", 1e-6)
"""Of the narrow vectors: the published code has this epsilon whatever the model's own is."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attributes:
    q_lora_rank: width of the vector that queries are made of; None: they are made of the hidden states.
    kv_lora_rank: of the one that keys and values are made of.
    qk_nope_head_dim, qk_rope_head_dim, value_dim: channels of a head's query and key that are not turned, that are, and of its
    value. scale: multiplies the scores; with the probability ``dropout`` a query does not see a key in training.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    value_dim: int
    scale: float
    position: RotarySpec
    dropout: float = 0.0

    window = None
    soft_cap = None

    @property
    def can_be_fused(self) -> bool:
        """Return True if the fused kernel supports it. Dropout is composed of operators."""
        return not self.dropout

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key and value heads, which equals that of query heads."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Return the channels of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def context(self) -> AttentionContext:
        """Return the tables and masks that this attention reads."""
        return AttentionContext(self.position, None, self.qk_rope_head_dim, self.num_heads)

    def matrices(self) -> Shapes:
        """Return the weights of matrix products."""
        plain, turned = self.num_heads * self.qk_nope_head_dim, self.num_heads * self.qk_rope_head_dim
        query: Shapes = {"wq_plain.weight": (plain, self.hidden_size), "wq_rotary.weight": (turned, self.hidden_size)}
        if self.q_lora_rank is not None:
            query = {"wq_down.weight": (self.q_lora_rank, self.hidden_size)}
            query |= {
                "wq_up_plain.weight": (plain, self.q_lora_rank),
                "wq_up_rotary.weight": (turned, self.q_lora_rank),
            }
        return {
            **query,
            "wkv_down.weight": (self.kv_lora_rank, self.hidden_size),
            "wk_rotary.weight": (self.qk_rope_head_dim, self.hidden_size),
            "wk_plain.weight": (plain, self.kv_lora_rank),
            "wv.weight": (self.num_heads * self.value_dim, self.kv_lora_rank),
            "wo.weight": (self.hidden_size, self.num_heads * self.value_dim),
        }

    def weights(self) -> Shapes:
        """Return all weights."""
        query = {} if self.q_lora_rank is None else {"query_latent_norm.weight": (self.q_lora_rank,)}
        return {**self.matrices(), **query, "key_value_latent_norm.weight": (self.kv_lora_rank,)}

    def flops_per_token(self, seq_length: int) -> float:
        """Return the FLOPs of forward and backward: weights and scores, not halved for the causal mask."""
        score_flops = self.num_heads * (self.head_dim + self.value_dim) * seq_length
        return FORWARD_AND_BACKWARD * (scalars(self.matrices()) + score_flops)


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True)
class DynamicRopeScaling:
    """The base grows with the length of the sequence (NTK-aware scaling; bloc97, 2023)."""

    factor: float
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequencies scaled by wavelength, as in Llama 3.1: low ones are divided by ``factor``, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRopeScaling:
    """Low frequencies interpolated, high ones kept, scores sharpened (YaRN; Peng et al., 2023)."""

    factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    original_max_position_embeddings: int | None = None

    def sharpened(self, share: float = 1.0) -> float:
        """Return ``0.1 · share · ln factor + 1``, by which scores grow with the context."""
        return 0.1 * share * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def magnitude(self) -> float:
        """Return the factor on both rotary tables."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.sharpened(self.mscale) / self.sharpened(self.mscale_all_dim)
        return self.sharpened()


RopeScaling = LinearRopeScaling | DynamicRopeScaling | Llama3RopeScaling | YarnRopeScaling
