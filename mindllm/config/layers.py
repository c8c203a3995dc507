"""What a decoder layer is made of, as values: attention, feed-forward, norm, position. A :class:`LayerSpec` combines them.

Every part knows its own arithmetic: weights by name and shape (``[out, in]``), matrix products per token. Layers with equal
specifications are of one kind: they need the same memory and time, and are compiled from the same cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mindllm.config.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from mindllm.config.experts import ExpertsSpec
    from mindllm.config.latent_attention import LatentAttentionSpec
    from mindllm.config.quantisation import CodeSpec
    from mindllm.config.tuning import AdapterSpec, BottleneckSpec

Shapes = dict[str, tuple[int, ...]]
Activation = Literal["silu", "gelu_tanh", "quick_gelu"]
ACTIVATION_OPERATORS: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu", "quick_gelu": "quick_gelu"}
"""The operators that compute them, by the names that patterns of ``recompute_config`` see."""
JOINT_PROJECTION = "eh_proj.weight"  # of embeddings and hidden states, in a layer that predicts ahead
GRADIENT = 2.0  # those of the product that yields the gradient of a weight
FORWARD_AND_BACKWARD = 6.0  # floating-point operations per weight of a matrix product and token: 2 forward, 4 backward


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
    kv_heads: int
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
        query, key_value = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
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
    width: int
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
        up = {"w1.weight": (self.width, self.hidden_size)}
        gate = {"w3.weight": (self.width, self.hidden_size)} if self.gated else {}
        return {**up, **gate, "w2.weight": (self.hidden_size, self.width)}

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


@dataclass(frozen=True)
class LayerSpec:
    """Norm, attention, norm, feed-forward, each with a residual connection.

    ``norm_output``: there are norms behind attention and feed-forward too, before they are added (Gemma 2, GLM-4). ``dropout`` is
    that of both results before they are added. ``adapters`` stand beside projections, ``bottlenecks`` behind the two parts;
    ``frozen`` are the weights that training does not change, and ``codes`` says which of them are held in codes.

    ``predicts_ahead``: a layer behind the others, in training only, whose hidden states predict the token one further than those
    it is given (DeepSeek-V3, section 2.2): before it a projection of the embeddings of the next tokens and those hidden states,
    each through a norm, behind it a norm of its own.
    """

    attention: AttentionSpec | LatentAttentionSpec
    feed_forward: FeedForwardSpec | ExpertsSpec
    norm: NormSpec
    norm_output: bool = False
    dropout: float = 0.0
    adapters: tuple[AdapterSpec, ...] = ()
    bottlenecks: tuple[BottleneckSpec, ...] = ()
    frozen: tuple[str, ...] = ()
    codes: tuple[CodeSpec, ...] = ()
    predicts_ahead: bool = False

    @property
    def drops(self) -> bool:
        """Whether it has any dropout."""
        dropped = (self.dropout, self.attention.dropout, *(adapter.dropout for adapter in self.adapters))
        return any(rate > 0 for rate in dropped)

    @property
    def adds_to_loss(self) -> bool:
        """Whether the layer yields something that is added to the loss besides hidden states: what keeps its experts balanced."""
        return self.feed_forward.adds_to_loss

    @property
    def added(self) -> tuple[AdapterSpec | BottleneckSpec, ...]:
        """What tuning adds."""
        return (*self.adapters, *self.bottlenecks)

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms over hidden states."""
        outer = ("attention_post_norm", "ffn_post_norm") if self.norm_output else ()
        return ("attention_norm", "ffn_norm", *outer)

    @property
    def name(self) -> str:
        """A word for tables in which the layers of a model are told apart."""
        attention = "global" if self.attention.window is None else "window"
        name = attention if isinstance(self.feed_forward, FeedForwardSpec) else f"{attention} experts"
        return f"{name} prediction" if self.predicts_ahead else name

    def weights(self) -> Shapes:
        """Names below the layer, in the order of the checkpoint."""
        hidden = self.attention.hidden_size
        parts = {"attention": self.attention.weights(), "feed_forward": self.feed_forward.weights()}
        norms = {norm: self.norm.weights(hidden) for norm in self.norms}
        own = {f"{part}.{name}": shape for part, shapes in {**norms, **parts}.items() for name, shape in shapes.items()}
        around = self._around_prediction() if self.predicts_ahead else {}
        return {**own, **around, **{name: shape for added in self.added for name, shape in added.weights().items()}}

    def _around_prediction(self) -> Shapes:
        """The weights before and behind a layer that predicts ahead, with DeepSeek's names."""
        hidden = self.attention.hidden_size
        norms = ("enorm", "hnorm", "final_norm")
        around = {f"{norm}.{name}": shape for norm in norms for name, shape in self.norm.weights(hidden).items()}
        return {**around, JOINT_PROJECTION: (hidden, 2 * hidden)}

    def last_of_branches(self) -> tuple[str, ...]:
        """The weights after which attention and feed-forward are added to the hidden states: with zeros there the layer adds
        nothing.
        """
        own = LayerSpec(self.attention, self.feed_forward, self.norm, self.norm_output).weights()
        return tuple(
            name
            for name in own
            if {"wo", "w2"} & {*name.split(".")} or name in ("attention_post_norm.bias", "ffn_post_norm.bias")
        )

    def flops_per_token(self, seq_length: int) -> float:
        """Matrix products of forward and backward; a frozen weight has no product for its gradient."""
        products = self.attention.flops_per_token(seq_length) + self.feed_forward.flops_per_token()
        if self.predicts_ahead:
            products += FORWARD_AND_BACKWARD * math.prod(self._around_prediction()[JOINT_PROJECTION])
        matrices = (shape for added in self.added for shape in added.weights().values() if len(shape) > 1)
        return products + FORWARD_AND_BACKWARD * sum(map(math.prod, matrices)) - self._not_computed()

    def _not_computed(self) -> float:
        """What the gradients of frozen matrices would take; of experts, of those a token meets."""
        frozen = {name: shape for name, shape in self.weights().items() if name in self.frozen and len(shape) > 1}
        met = self.feed_forward.active_parameters() / scalars(self.feed_forward.weights())
        return GRADIENT * sum(
            math.prod(shape) * (met if ".experts." in name else 1.0) for name, shape in frozen.items()
        )


def scalars(shapes: Shapes) -> int:
    """How many numbers there are in weights of these shapes."""
    return sum(map(math.prod, shapes.values()))
