"""One layer of the decoder: attention and feed-forward, each with a norm before it and a residual connection."""

from __future__ import annotations

from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import LatentAttentionSpec
from mindllm.models.attention.attention import Attention, Tables
from mindllm.models.attention.latent_attention import LatentAttention
from mindllm.models.dropout import Dropout
from mindllm.models.experts.experts import Experts
from mindllm.models.feed_forward import FeedForward
from mindllm.models.kernels import Kernels
from mindllm.models.norm import make_norm
from mindllm.models.weights import InitStd

ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT = 3, 4  # salts of random numbers


class DecoderLayer(nn.Cell):
    """``x += attention(norm(x)); x += feed_forward(norm(x))`` on ``[batch · seq, hidden]``, with norms after both if the
    specification has them.

    Returns hidden states. With ``adds_to_loss`` they come with the loss that each sequence adds to the mean loss of its tokens,
    fp32 ``[batch]``.
    """

    def __init__(self, spec: LayerSpec, kernels: Kernels, spread: InitStd, seq_length: int) -> None:
        super().__init__()
        hidden = spec.attention.hidden_size
        self.attention_norm = make_norm(hidden, spec.norm, kernels)
        if isinstance(spec.attention, LatentAttentionSpec):
            self.attention = LatentAttention(spec.attention, kernels, spread, seq_length)
        else:
            self.attention = Attention(spec.attention, kernels, spread, seq_length)
        self.ffn_norm = make_norm(hidden, spec.norm, kernels)
        self.has_experts = isinstance(spec.feed_forward, ExpertsSpec)
        if isinstance(spec.feed_forward, ExpertsSpec):
            self.feed_forward = Experts(spec.feed_forward, kernels, spread, seq_length)
        else:
            self.feed_forward = FeedForward(spec.feed_forward, kernels, spread)
        self.attention_add = P.Add()
        self.ffn_add = P.Add()
        self.is_wider = kernels.hidden != kernels.activation
        if self.is_wider:
            self.cast = P.Cast()
            self.hidden_dtype = kernels.hidden
        self.adds_to_loss = spec.adds_to_loss
        if spec.adds_to_loss:
            self.add_to_loss = P.Add()
        self.drops = spec.dropout > 0
        if self.drops:
            self.attention_dropout = Dropout(spec.dropout, hidden, ATTENTION_OUTPUT, again=not kernels.cpu)
            self.ffn_dropout = Dropout(spec.dropout, hidden, FEED_FORWARD_OUTPUT, again=not kernels.cpu)
        self.norm_output = spec.norm_output
        if spec.norm_output:
            self.attention_post_norm = make_norm(hidden, spec.norm, kernels)
            self.ffn_post_norm = make_norm(hidden, spec.norm, kernels)
        self.adapts_attention = self.adapts_feed_forward = False

    def attach_after_attention(self, adapter: nn.Cell) -> None:
        """Pass the result of the attention, ``[batch · seq, hidden]``, through ``adapter``, which keeps its shape."""
        self.attention_adapter, self.adapts_attention = adapter, True

    def attach_after_feed_forward(self, adapter: nn.Cell) -> None:
        """Pass the result of the feed-forward through ``adapter``, which keeps its shape."""
        self.feed_forward_adapter, self.adapts_feed_forward = adapter, True

    def construct(
        self,
        x: Tensor,
        batch: int,
        tables: Tables,
        mask: Tensor,
        added: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the layer. ``added``: the loss added by earlier layers, passed on so that each stage computes its part.
        ``random``, int32 ``[batch, seq]``: the keys of dropout; None disables it.
        """
        x = self.after_attention(x, self.attention(self.attention_norm(x), batch, tables, mask, random), random)
        if not self.adds_to_loss:
            return self.after_feed_forward(x, batch, True, random)
        x, layer_loss = self.after_feed_forward(x, batch, True, random)
        return x, layer_loss if added is None else self.add_to_loss(added, layer_loss)

    def after_attention(self, x: Tensor, attended: Tensor, random: Tensor | None = None) -> Tensor:
        """Add the residual connection around the attention."""
        if self.adapts_attention:
            attended = self.attention_adapter(attended)
        if self.norm_output:
            attended = self.attention_post_norm(attended)
        if self.drops:
            attended = self.attention_dropout(attended, random)
        return self.attention_add(x, self.widened(attended))

    def after_feed_forward(
        self, x: Tensor, batch: int, may_drop: bool = True, random: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the second half of the layer. ``may_drop``: whether full experts drop tokens."""
        if self.adds_to_loss:
            y, added = self.feed_forward(self.ffn_norm(x), batch, may_drop, random)
            return self.around_feed_forward(x, y, random), added
        if self.has_experts:
            return self.around_feed_forward(x, self.feed_forward(self.ffn_norm(x), batch, may_drop, random), random)
        return self.around_feed_forward(x, self.feed_forward(self.ffn_norm(x), random), random)

    def around_feed_forward(self, x: Tensor, y: Tensor, random: Tensor | None) -> Tensor:
        """Add the residual connection around the feed-forward."""
        if self.adapts_feed_forward:
            y = self.feed_forward_adapter(y)
        if self.norm_output:
            y = self.ffn_post_norm(y)
        if self.drops:
            y = self.ffn_dropout(y, random)
        return self.ffn_add(x, self.widened(y))

    def widened(self, y: Tensor) -> Tensor:
        """Convert a branch to the dtype of hidden states."""
        return self.cast(y, self.hidden_dtype) if self.is_wider else y
