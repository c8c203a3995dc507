"""The pre-norm decoder (Touvron et al., 2023): embedding, layers, final norm. One class for all families.

Layer ``i`` is built from ``architecture.layers[i]``; what families differ in are fields of such specifications.
"""

from __future__ import annotations

from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.config.experts import ExpertsSpec
from mindllm.config.latent_attention import LatentAttentionSpec
from mindllm.config.layers import AlibiSpec, AttentionContext, LayerSpec, RotarySpec
from mindllm.models.alibi import alibi_bias
from mindllm.models.attention import Attention, Tables
from mindllm.models.dropout import Dropout, EmbeddingNoise, Keys
from mindllm.models.experts import Experts
from mindllm.models.feed_forward import FeedForward
from mindllm.models.kernels import Kernels
from mindllm.models.latent_attention import LatentAttention
from mindllm.models.norm import make_norm
from mindllm.models.rotary import rotary_tables
from mindllm.models.weights import Spread, constant, normal_parameter

COMPRESSED_MASK_SIZE = 2048  # what FlashAttentionScore wants with a compressed causal mask
EMBEDDINGS, ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT, NOISE = 2, 3, 4, 5  # salts of the numbers that are drawn by
MASKED = -1e9  # far below any score, and finite, so that a fully masked row stays finite


class TokenEmbedding(nn.Cell):
    """``[batch, seq]`` token ids -> ``[batch · seq, hidden]`` in hidden states' dtype, scaled where the architecture says."""

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        shape = (model.vocab_size, model.hidden_size)
        self.embedding_weight = normal_parameter("embedding_weight", shape, model.initializer_range)
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.cast = P.Cast()
        self.output_dtype = kernels.hidden
        scale = model.architecture.embedding.scale
        self.scales = scale is not None
        if scale is not None:
            self.mul = P.Mul()
            self.scale = Tensor(scale, kernels.operand).astype(kernels.hidden)  # rounded as published models do

    def construct(self, input_ids: Tensor) -> Tensor:
        x = self.gather(self.embedding_weight, self.reshape(input_ids, (-1,)), 0)
        x = self.cast(x, self.output_dtype)
        return self.mul(x, self.scale) if self.scales else x


class PositionEmbedding(nn.Cell):
    """Adds learned vectors ``[positions, hidden]`` to hidden states ``[batch · seq, hidden]`` (Radford et al., 2019)."""

    def __init__(self, positions: int, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        shape = (positions, model.hidden_size)
        self.embedding_weight = normal_parameter("embedding_weight", shape, model.initializer_range)
        self.in_order = Tensor(kernels.positions(model.seq_length))
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.add = P.Add()
        self.cast = P.Cast()
        self.output_dtype = kernels.hidden

    def construct(self, x: Tensor, batch: int, position_ids: Tensor | None = None) -> Tensor:
        """``position_ids``, int32 ``[batch, seq]``: where in its document each token stands; absent: 0 to seq - 1."""
        if position_ids is None:
            rows = self.cast(self.gather(self.embedding_weight, self.in_order, 0), self.output_dtype)
        else:
            rows = self.at(position_ids)
        return self.reshape(self.add(self.reshape(x, (batch, -1, x.shape[-1])), rows), x.shape)

    def at(self, position_ids: Tensor) -> Tensor:
        """The vectors ``[batch, tokens, hidden]`` of positions ``[batch, tokens]``."""
        rows = self.gather(self.embedding_weight, self.reshape(position_ids, (-1,)), 0)
        return self.cast(self.reshape(rows, (*position_ids.shape, -1)), self.output_dtype)


class DecoderLayer(nn.Cell):
    """``x += attention(norm(x)); x += feed_forward(norm(x))`` on ``[batch · seq, hidden]``, with norms behind both where
    the specification has them.

    Returns hidden states; where ``adds_to_loss``, as the specification says, they come with what each sequence adds to the mean
    loss of its tokens, fp32 ``[batch]``.
    """

    def __init__(self, spec: LayerSpec, kernels: Kernels, spread: Spread, seq_length: int) -> None:
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
            self.attention_dropout = Dropout(spec.dropout, hidden, ATTENTION_OUTPUT)
            self.ffn_dropout = Dropout(spec.dropout, hidden, FEED_FORWARD_OUTPUT)
        self.norm_output = spec.norm_output
        if spec.norm_output:
            self.attention_post_norm = make_norm(hidden, spec.norm, kernels)
            self.ffn_post_norm = make_norm(hidden, spec.norm, kernels)
        self.adapts_attention = self.adapts_feed_forward = False

    def attach_behind_attention(self, adapter: nn.Cell) -> None:
        """Sends what the attention yields, ``[batch · seq, hidden]``, through ``adapter``, which keeps its form."""
        self.attention_adapter, self.adapts_attention = adapter, True

    def attach_behind_feed_forward(self, adapter: nn.Cell) -> None:
        """The same behind the feed-forward."""
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
        """``added``: what layers before have added; it goes from layer to layer so that it is computed on their stages.
        ``random``, int32 ``[batch, seq]``: what dropout is drawn by; None: nothing is dropped.
        """
        x = self.after_attention(x, self.attention(self.attention_norm(x), batch, tables, mask, random), random)
        if not self.adds_to_loss:
            return self.after_feed_forward(x, batch, True, random)
        x, own = self.after_feed_forward(x, batch, True, random)
        return x, own if added is None else self.add_to_loss(added, own)

    def after_attention(self, x: Tensor, attended: Tensor, random: Tensor | None = None) -> Tensor:
        """The residual connection around the attention."""
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
        """The second half of the layer. ``may_drop``: experts that are full let tokens go."""
        if self.adds_to_loss:
            y, added = self.feed_forward(self.ffn_norm(x), batch, may_drop, random)
            return self.around_feed_forward(x, y, random), added
        if self.has_experts:
            return self.around_feed_forward(x, self.feed_forward(self.ffn_norm(x), batch, may_drop, random), random)
        return self.around_feed_forward(x, self.feed_forward(self.ffn_norm(x), random), random)

    def around_feed_forward(self, x: Tensor, y: Tensor, random: Tensor | None) -> Tensor:
        """The residual connection around the feed-forward."""
        if self.adapts_feed_forward:
            y = self.feed_forward_adapter(y)
        if self.norm_output:
            y = self.ffn_post_norm(y)
        if self.drops:
            y = self.ffn_dropout(y, random)
        return self.ffn_add(x, self.widened(y))

    def widened(self, y: Tensor) -> Tensor:
        """What is added to hidden states, in their dtype."""
        return self.cast(y, self.hidden_dtype) if self.is_wider else y


class ContextTables(nn.Cell):
    """What layers of one context read: position tables for ``seq_length`` positions, and the mask.

    They are parameters without gradient: constants would be copied into the compiled graph once per use.
    """

    def __init__(self, context: AttentionContext, seq_length: int, kernels: Kernels) -> None:
        super().__init__()
        self.rotates = isinstance(context.position, RotarySpec)
        self.biased = isinstance(context.position, AlibiSpec)
        if isinstance(context.position, RotarySpec):
            cos, sin = rotary_tables(context.position, context.head_dim, seq_length)
            positions = kernels.positions(seq_length)
            self.rotary_cos = constant("rotary_cos", cos[positions])
            self.rotary_sin = constant("rotary_sin", sin[positions])
        if self.biased:
            self.alibi_bias = constant("alibi_bias", alibi_bias(context.num_heads, seq_length))
        mask = causal_mask(seq_length, kernels, context.window)
        if (
            kernels.document_masks
        ):  # as those of rows are: a parameter that is reshaped is split over all devices, and gathered
            mask = mask[np.newaxis, np.newaxis]
        self.attention_mask = constant("attention_mask", mask)

    def construct(self) -> tuple[Tables, Tensor]:
        if self.rotates:
            return (self.rotary_cos, self.rotary_sin), self.attention_mask
        if self.biased:
            return (self.alibi_bias,), self.attention_mask
        return (), self.attention_mask


class DocumentMask(nn.Cell):
    """The causal mask ``[1, 1, seq, seq]`` -> one for every row, ``[batch, 1, seq, seq]``, that hides earlier documents too.

    ``segment_starts``, int32 ``[batch, seq]``: where in its row the document of each token begins. Of a key before the
    causal diagonal, that is all a query must know. Same dtype and meaning as the causal mask.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.columns = Tensor(np.arange(length, dtype=np.int32).reshape(1, 1, 1, length))
        self.less = P.Less()
        self.reshape = P.Reshape()
        self.cast = P.Cast()
        self.maximum = P.Maximum()
        self.far_below = P.Mul()
        self.minimum = P.Minimum()

    def construct(self, segment_starts: Tensor, causal: Tensor) -> Tensor:
        starts = self.reshape(segment_starts, (segment_starts.shape[0], 1, -1, 1))
        hidden = self.less(self.columns, starts)
        if causal.dtype == ms.uint8:
            mask = self.cast(self.maximum(self.cast(hidden, ms.int32), self.cast(causal, ms.int32)), ms.uint8)
        else:
            mask = self.minimum(self.far_below(self.cast(hidden, ms.float32), MASKED), causal)
        return P.stop_gradient(mask)  # or the compiler looks for the gradient of an exchange of integers


class AttentionTables(nn.Cell):
    """The tables and masks of all layers, one :class:`ContextTables` for each of the architecture's contexts.

    Where documents are kept apart, they become those of each row (:meth:`of_rows`).
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.contexts = nn.CellList(
            [ContextTables(context, model.seq_length, kernels) for context in model.architecture.contexts()]
        )
        if kernels.document_masks:
            self.document_mask = DocumentMask(model.seq_length)
            self.gather = P.Gather()
            self.reshape = P.Reshape()

    def construct(self, context: int) -> tuple[Tables, Tensor]:
        return self.contexts[context]()

    def of_rows(self, segment_starts: Tensor | None, position_ids: Tensor | None) -> tuple[tuple[Tables, Tensor], ...]:
        """The tables of each context as the documents of each row want them, made once for all layers."""
        made: tuple[tuple[Tables, Tensor], ...] = ()
        for context in self.contexts:
            tables, mask = context()
            if segment_starts is not None:
                mask = self.document_mask(segment_starts, mask)
            if len(tables) == 2:  # rotary; ALiBi's bias differs by a number per row only, which no softmax sees
                tables = (self.at_positions(tables[0], position_ids), self.at_positions(tables[1], position_ids))
            made = (*made, (tables, mask))
        return made

    def at_positions(self, table: Tensor, position_ids: Tensor | None) -> Tensor:
        """A table ``[seq, head_dim]`` at the positions of each row: ``[batch, 1, seq, head_dim]``."""
        if position_ids is None:
            return table
        rows = self.gather(table, self.reshape(position_ids, (-1,)), 0)
        return self.reshape(rows, (position_ids.shape[0], 1, -1, table.shape[-1]))


class Decoder(nn.Cell):
    """Token ids ``[batch, seq]`` -> hidden states ``[batch · seq, hidden]`` after the final norm.

    Where layers add to the loss (``adds_to_loss``), hidden states come with the sum of what they add, ``[batch]``.

    ``segment_starts`` and ``position_ids``, both int32 ``[batch, seq]`` or absent, keep the documents of a row apart:
    attention within a document only (:class:`DocumentMask`), and positions other than 0 to seq - 1.

    ``random``, int32 ``[batch, seq]``, is what dropout and noise are drawn by; without it there is neither.

    ``table_of_layer`` names the copy of the tables each layer reads. All share one here; where layers live on different
    devices there is a copy for each group of layers.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        architecture, spread = model.architecture, Spread.of(model)
        self.tok_embeddings = TokenEmbedding(model, kernels)
        embedding = architecture.embedding
        self.adds_noise = embedding.noise is not None
        if embedding.noise is not None:
            self.embedding_noise = EmbeddingNoise(embedding.noise, model.seq_length, model.hidden_size, NOISE)
        self.learns_positions = embedding.learned_positions is not None
        if embedding.learned_positions is not None:
            self.position_embeddings = PositionEmbedding(embedding.learned_positions, model, kernels)
        self.norms_embeddings = embedding.norm is not None
        if embedding.norm is not None:
            self.embedding_norm = make_norm(
                model.hidden_size, embedding.norm, replace(kernels, activation=kernels.hidden)
            )
        self.layers = nn.CellList(
            [DecoderLayer(spec, kernels, spread, model.seq_length) for spec in architecture.layers]
        )
        self.norm_out = make_norm(model.hidden_size, architecture.final_norm, kernels)
        self.drops_embeddings = embedding.dropout > 0
        if self.drops_embeddings:
            self.embedding_dropout = Dropout(embedding.dropout, model.hidden_size, EMBEDDINGS)
        self.drops = tuple(spec.drops for spec in architecture.layers)
        if any(self.drops):  # outside of layers, which are alike and compiled once
            self.dropout_keys = nn.CellList([Keys(number) for number in range(len(architecture.layers))])
        self.tables = nn.CellList([AttentionTables(model, kernels)])
        self.table_of_layer = (0,) * len(architecture.layers)
        contexts = architecture.contexts()
        self.context_of_layer = tuple(contexts.index(spec.attention.context) for spec in architecture.layers)
        self.adds_to_loss = any(spec.adds_to_loss for spec in architecture.layers)
        self.document_masks = kernels.document_masks

    def construct(
        self,
        input_ids: Tensor,
        segment_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not self.document_masks and not (segment_starts is None and position_ids is None):
            raise ValueError("the model was built without document_masks and cannot keep documents apart")
        batch = input_ids.shape[0]
        x = self.embedded(input_ids, batch, position_ids, random)
        of_rows: tuple = ()  # of each copy of the tables, where documents are kept apart
        if self.document_masks:
            for tables in self.tables:
                of_rows = (*of_rows, tables.of_rows(segment_starts, position_ids))
        added = None
        for index, layer in enumerate(self.layers):
            context, copy = self.context_of_layer[index], self.table_of_layer[index]
            tables, mask = of_rows[copy][context] if of_rows else self.tables[copy](context)
            own = self.dropout_keys[index](random) if self.drops[index] and random is not None else None
            if layer.adds_to_loss:
                x, added = layer(x, batch, tables, mask, added, own)
            elif own is not None:
                x = layer(x, batch, tables, mask, None, own)
            else:
                x = layer(x, batch, tables, mask)
        hidden = self.norm_out(x)
        return (hidden, added) if self.adds_to_loss else hidden

    def embedded(
        self, input_ids: Tensor, batch: int, position_ids: Tensor | None, random: Tensor | None = None
    ) -> Tensor:
        """What the first layer gets: ``[batch · seq, hidden]``."""
        x = self.tok_embeddings(input_ids)
        if self.adds_noise:
            x = self.embedding_noise(x, random)
        if self.learns_positions:
            x = self.position_embeddings(x, batch, position_ids)
        if self.norms_embeddings:
            x = self.embedding_norm(x)
        return self.embedding_dropout(x, random) if self.drops_embeddings else x


def causal_mask(seq_length: int, kernels: Kernels, window: int | None = None) -> np.ndarray:
    """Hides keys behind the query, and those more than ``window - 1`` before it.

    Composed attention: additive fp32 ``[seq, seq]``; flash attention: uint8, 1 = masked, ``[2048, 2048]`` for all lengths
    unless masks differ by row (the compressed form is the triangle in every case, windows are told by number).
    """
    if kernels.flash_attention and not kernels.document_masks:
        return np.triu(np.ones((COMPRESSED_MASK_SIZE, COMPRESSED_MASK_SIZE), np.uint8), k=1)
    hidden = np.triu(np.ones((seq_length, seq_length), bool), k=1)
    if window is not None:
        hidden |= np.tril(np.ones((seq_length, seq_length), bool), k=-window)
    return hidden.astype(np.uint8) if kernels.flash_attention else np.where(hidden, MASKED, 0.0).astype(np.float32)
