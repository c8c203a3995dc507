"""A decoder layer as a value: :class:`LayerSpec` combines attention, feed-forward, norms, and what tuning adds to them.

Layers with equal specifications are of one kind: they need the same memory and time, and are compiled from the same cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindllm.architecture.adapters import WEIGHT, AdapterSpec, BottleneckSpec
from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.parts import (
    FORWARD_AND_BACKWARD,
    GRADIENT,
    AttentionSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    NormSpec,
    Shapes,
    scalars,
)
from mindllm.architecture.quantization import CodeSpec

JOINT_PROJECTION = "eh_proj.weight"  # of embeddings and hidden states, in a layer that predicts ahead


@dataclass(frozen=True)
class LayerSpec:
    """Norm, attention, norm, feed-forward, with residual connections.

    ``norm_output``: additional norms on the outputs of attention and feed-forward (Gemma 2, GLM-4). ``dropout`` applies to both
    outputs. ``adapters`` are added to projections, ``bottlenecks`` follow the two parts; ``frozen`` are the weights that are not
    trained, and ``codes`` describes the quantized ones.

    ``is_mtp``: a multi-token prediction layer, in training only, that predicts the token after the one of its input hidden states
    (DeepSeek-V3, section 2.2). It begins with a projection of the normalized embeddings of the next tokens and hidden states, and
    ends with a separate norm.
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
    is_mtp: bool = False

    @property
    def drops(self) -> bool:
        """Return True if the layer has dropout."""
        dropped = (self.dropout, self.attention.dropout, *(adapter.dropout for adapter in self.adapters))
        return any(rate > 0 for rate in dropped)

    @property
    def adds_to_loss(self) -> bool:
        """Return True if the layer adds an auxiliary loss of its experts."""
        return self.feed_forward.adds_to_loss

    @property
    def added(self) -> tuple[AdapterSpec | BottleneckSpec, ...]:
        """Return the adapters and bottlenecks."""
        return (*self.adapters, *self.bottlenecks)

    @property
    def norms(self) -> tuple[str, ...]:
        """Return the names of the norms over hidden states."""
        outer = ("attention_post_norm", "ffn_post_norm") if self.norm_output else ()
        return ("attention_norm", "ffn_norm", *outer)

    @property
    def name(self) -> str:
        """Return a short name of the layer for tables."""
        attention = "global" if self.attention.window is None else "window"
        name = attention if isinstance(self.feed_forward, FeedForwardSpec) else f"{attention} experts"
        return f"{name} prediction" if self.is_mtp else name

    def weights(self) -> Shapes:
        """Return names relative to the layer, in the order of checkpoints."""
        hidden = self.attention.hidden_size
        parts = {"attention": self.attention.weights(), "feed_forward": self.feed_forward.weights()}
        norms = {norm: self.norm.weights(hidden) for norm in self.norms}
        weights = {
            f"{part}.{name}": shape for part, shapes in {**norms, **parts}.items() for name, shape in shapes.items()
        }
        around = self._around_prediction() if self.is_mtp else {}
        return {**weights, **around, **{name: shape for added in self.added for name, shape in added.weights().items()}}

    def _around_prediction(self) -> Shapes:
        """Return the additional weights of a multi-token prediction layer, with DeepSeek's names."""
        hidden = self.attention.hidden_size
        norms = ("enorm", "hnorm", "final_norm")
        around = {f"{norm}.{name}": shape for norm in norms for name, shape in self.norm.weights(hidden).items()}
        return {**around, JOINT_PROJECTION: (hidden, 2 * hidden)}

    def adaptable(self) -> Shapes:
        """Return the projections that can have an adapter, by name, and the shapes of their weights ``[out, in]``.

        Experts and their router have none, because they do not project all tokens.
        """
        parts = {"attention": self.attention.matrices(), "feed_forward": self.feed_forward.matrices()}
        return {
            f"{part}.{name.removesuffix(WEIGHT)}": shape
            for part, matrices in parts.items()
            for name, shape in matrices.items()
            if len(shape) == 2 and not name.startswith(("router.", "experts.", "shared_gate."))
        }

    def last_of_branches(self) -> tuple[str, ...]:
        """Return the last weights of attention and feed-forward: if they are zero, the layer adds nothing."""
        names = LayerSpec(self.attention, self.feed_forward, self.norm, self.norm_output).weights()
        return tuple(
            name
            for name in names
            if {"wo", "w2"} & {*name.split(".")} or name in ("attention_post_norm.bias", "ffn_post_norm.bias")
        )

    def flops_per_token(self, seq_length: int) -> float:
        """Return the FLOPs of matrix products in forward and backward, without gradients of frozen weights."""
        products = self.attention.flops_per_token(seq_length) + self.feed_forward.flops_per_token()
        if self.is_mtp:
            products += FORWARD_AND_BACKWARD * math.prod(self._around_prediction()[JOINT_PROJECTION])
        matrices = (shape for added in self.added for shape in added.weights().values() if len(shape) > 1)
        return products + FORWARD_AND_BACKWARD * sum(map(math.prod, matrices)) - self._not_computed()

    def _not_computed(self) -> float:
        """Return the FLOPs of the gradients of frozen matrices, which are not computed."""
        frozen = {name: shape for name, shape in self.weights().items() if name in self.frozen and len(shape) > 1}
        met = self.feed_forward.active_parameters() / scalars(self.feed_forward.weights())
        return GRADIENT * sum(
            math.prod(shape) * (met if ".experts." in name else 1.0) for name, shape in frozen.items()
        )
