"""What a decoder layer is made of, as values: norm, position, attention, feed-forward.

Every part knows its own arithmetic: weights by name and shape (``[out, in]``), matrix products per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mindllm.architecture.rope_scaling import RopeScaling

Shapes = dict[str, tuple[int, ...]]
Activation = Literal["silu", "gelu_tanh", "quick_gelu"]
ACTIVATION_OPERATORS: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu", "quick_gelu": "quick_gelu"}
"""The operators that compute them, by the names that patterns of ``recompute_config`` see."""
GRADIENT = 2.0  # those of the product that yields the gradient of a weight
FORWARD_AND_BACKWARD = 6.0  # floating-point operations per weight of a matrix product and token: 2 forward, 4 backward


def scalars(shapes: Shapes) -> int:
    """How many numbers there are in weights of these shapes."""
    return sum(map(math.prod, shapes.values()))


@dataclass(frozen=True)
class NormSpec:
    """``rms``: root mean square (Zhang & Sennrich, 2019); ``rms_one``: the same, its weight is what is added to 1 (Gemma);
    ``layer``: LayerNorm with a bias (Ba et al., 2016).
    """

    kind: Literal["rms", "rms_one", "layer"]
    eps: float

    def weights(self, width: int) -> Shapes:
        """Names and shapes for a norm over ``width`` channels."""
        return {"weight": (width,), **({"bias": (width,)} if self.kind == "layer" else {})}


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions (Su et al., 2021) on the first ``rotary_dim`` channels of a head; ``scaling`` stretches them.

    ``max_position`` is the context the scaling is relative to where it does not say one itself.
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
        """What this attention reads besides hidden states and weights."""
        return AttentionContext(self.position, self.window, self.head_dim, self.num_heads)

    @property
    def value_dim(self) -> int:
        """Channels of a head's value."""
        return self.head_dim

    @property
    def can_be_fused(self) -> bool:
        """Whether the fused kernel of devices computes it; soft caps, ALiBi and dropout are composed everywhere."""
        return self.soft_cap is None and not isinstance(self.position, AlibiSpec) and not self.dropout

    def matrices(self) -> Shapes:
        """The weights of its matrix products."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "wq.weight": (query, self.hidden_size),
            "wk.weight": (key_value, self.hidden_size),
            "wv.weight": (key_value, self.hidden_size),
            "wo.weight": (self.hidden_size, query),
        }

    def weights(self) -> Shapes:
        """All weights."""
        matrices = self.matrices()
        biased = ["wq", "wk", "wv"] * self.qkv_bias + ["wo"] * self.out_bias
        norms = {} if self.query_key_norm is None else self.query_key_norm.weights(self.head_dim)
        return {
            **matrices,
            **{f"{name}.bias": matrices[f"{name}.weight"][:1] for name in biased},
            **{f"{norm}.{name}": shape for norm in ("query_norm", "key_norm") for name, shape in norms.items()},
        }

    def flops_per_token(self, seq_length: int) -> float:
        """Forward and backward: weights, and scores and contexts of a sequence, not halved for the causal mask."""
        seen = min(seq_length, self.window or seq_length)
        return FORWARD_AND_BACKWARD * scalars(self.matrices()) + 12.0 * self.num_heads * self.head_dim * seen


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
        """As patterns of ``recompute_config`` name it."""
        return ACTIVATION_OPERATORS[self.activation]

    def matrices(self) -> Shapes:
        """The weights of its matrix products."""
        up = {"w1.weight": (self.intermediate_size, self.hidden_size)}
        gate = {"w3.weight": (self.intermediate_size, self.hidden_size)} if self.gated else {}
        return {**up, **gate, "w2.weight": (self.hidden_size, self.intermediate_size)}

    def weights(self) -> Shapes:
        """All weights."""
        matrices = self.matrices()
        biased = matrices if self.bias else ["w2.weight"] * self.out_bias
        return {**matrices, **{name.replace("weight", "bias"): matrices[name][:1] for name in biased}}

    @property
    def adds_to_loss(self) -> bool:
        """A dense feed-forward adds nothing to the loss."""
        return False

    def flops_per_token(self) -> float:
        """Forward and backward."""
        return FORWARD_AND_BACKWARD * scalars(self.matrices())

    def active_parameters(self) -> int:
        """Weights a token meets: all."""
        return scalars(self.weights())
