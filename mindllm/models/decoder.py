"""The pre-norm decoder (Touvron et al., 2023): embedding, layers, final norm. One class for all families.

Layer ``i`` is built from ``architecture.layers[i]``; what families differ in are fields of such specifications.
"""

from __future__ import annotations

from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.parts import AttentionContext, RotarySpec
from mindllm.architecture.rotary_tables import rotary_tables
from mindllm.config import ModelConfig
from mindllm.models.attention.attention import Tables
from mindllm.models.decoder_layer import DecoderLayer
from mindllm.models.dropout import Dropout, EmbeddingNoise, Keys
from mindllm.models.fine_grain_interleave import FineGrainInterleavedLayer
from mindllm.models.kernels import Kernels
from mindllm.models.mtp import MTPLayer
from mindllm.models.norm import make_norm
from mindllm.models.pieces import PieceTables
from mindllm.models.weights import InitStd, constant, normal_parameter

COMPRESSED_MASK_SIZE = 2048  # required by FlashAttentionScore
EMBEDDINGS, NOISE = 2, 5  # salts of random numbers, in addition to those of layers
MASKED = -1e9  # far below any score, and finite, so that a fully masked row stays finite


class Lookup(nn.Cell):
    """A lookup of token ids ``[batch, seq]`` in a table ``[vocab, hidden]`` -> ``[batch · seq, hidden]`` in the dtype of hidden
    states, scaled if the architecture has a scale.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.cast = P.Cast()
        self.output_dtype = kernels.hidden
        scale = model.architecture.embedding.scale
        self.scales = scale is not None
        if scale is not None:
            self.mul = P.Mul()
            self.scale = Tensor(scale, kernels.operand).astype(kernels.hidden)  # rounded as published models do

    def looked_up(self, table: Tensor, input_ids: Tensor) -> Tensor:
        x = self.gather(table, self.reshape(input_ids, (-1,)), 0)
        x = self.cast(x, self.output_dtype)
        return self.mul(x, self.scale) if self.scales else x


class SharedEmbedding(Lookup):
    """A lookup in a table that another cell has."""

    def construct(self, table: Tensor, input_ids: Tensor) -> Tensor:
        return self.looked_up(table, input_ids)


class TokenEmbedding(Lookup):
    """A lookup with its table."""

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__(model, kernels)
        shape = (model.vocab_size, model.hidden_size)
        self.embedding_weight = normal_parameter("embedding_weight", shape, model.initializer_range, kernels.weights)

    def construct(self, input_ids: Tensor) -> Tensor:
        return self.looked_up(self.embedding_weight, input_ids)


class PositionEmbedding(nn.Cell):
    """Adds learned vectors ``[positions, hidden]`` to hidden states ``[batch · seq, hidden]`` (Radford et al., 2019)."""

    def __init__(self, positions: int, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        shape = (positions, model.hidden_size)
        self.embedding_weight = normal_parameter("embedding_weight", shape, model.initializer_range, kernels.weights)
        self.in_order = Tensor(kernels.positions(model.seq_length))
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.add = P.Add()
        self.cast = P.Cast()
        self.output_dtype = kernels.hidden

    def construct(self, x: Tensor, batch: int, position_ids: Tensor | None = None) -> Tensor:
        """Add the vectors. ``position_ids``, int32 ``[batch, seq]``: positions in documents; default 0 to seq - 1."""
        if position_ids is None:
            rows = self.cast(self.gather(self.embedding_weight, self.in_order, 0), self.output_dtype)
        else:
            rows = self.at(position_ids)
        return self.reshape(self.add(self.reshape(x, (batch, -1, x.shape[-1])), rows), x.shape)

    def at(self, position_ids: Tensor) -> Tensor:
        """Return the vectors ``[batch, tokens, hidden]`` of positions ``[batch, tokens]``."""
        rows = self.gather(self.embedding_weight, self.reshape(position_ids, (-1,)), 0)
        return self.cast(self.reshape(rows, (*position_ids.shape, -1)), self.output_dtype)


class ContextTables(nn.Cell):
    """Position tables for ``seq_length`` positions and the mask, for layers of one context.

    They are parameters without gradient: constants would be copied into the compiled graph at each use. If documents are
    separated, each row has its own mask (:class:`DocumentMask`).
    """

    def __init__(self, context: AttentionContext, seq_length: int, kernels: Kernels) -> None:
        super().__init__()
        self.rotates = isinstance(context.position, RotarySpec)
        if isinstance(context.position, RotarySpec):
            cos, sin = rotary_tables(context.position, context.head_dim, seq_length)
            positions = kernels.positions(seq_length)
            self.rotary_cos = constant("rotary_cos", cos[positions])
            self.rotary_sin = constant("rotary_sin", sin[positions])
        self.masks_rows = kernels.document_masks and not kernels.ring  # a ring has no documents
        if self.masks_rows:
            self.document_mask = DocumentMask(seq_length, context.window, kernels.flash_attention)
        else:
            self.attention_mask = constant("attention_mask", causal_mask(seq_length, kernels, context.window))
        self.in_pieces = kernels.pieces is not None
        if kernels.pieces is not None:
            fused, dtype = kernels.flash_attention, kernels.activation
            self.piece = PieceTables(kernels.pieces.count, seq_length, fused, dtype)

    def construct(self) -> tuple[Tables, Tensor]:
        return self.positions(), self.attention_mask

    def make_piece_tables(self, number: Tensor) -> tuple[Tables, Tensor]:
        """Return the tables and the mask for a piece of each sequence; ``number``: int32 ``[]``."""
        return self.piece(number, self.positions(), self.attention_mask)

    def positions(self) -> Tables:
        """Return the position tables."""
        if self.rotates:
            return (self.rotary_cos, self.rotary_sin)
        return ()


class DocumentMask(nn.Cell):
    """A mask ``[batch, 1, seq, seq]`` of keys after the query, more than ``window - 1`` before it, and of other documents. For
    the fused kernel it is uint8 with 1 = masked, otherwise fp32 to add to the scores.

    ``segment_starts``, int32 ``[batch, seq]``: the start in its row of the document of each token, which decides about keys
    before the query. Without it documents see each other, and all rows have one mask ``[1, 1, seq, seq]``.

    Positions are compared, so that no device needs the whole mask (16 GiB for 131,072 tokens): devices that share a sequence have
    the rows of their queries. ``keys`` is a parameter, because the compiler would evaluate comparisons of constants.
    """

    def __init__(self, length: int, window: int | None, fused: bool) -> None:
        super().__init__()
        places = np.arange(length, dtype=np.int32)
        self.keys = constant("keys", places.reshape(1, 1, 1, length))
        self.queries = Tensor(places.reshape(1, 1, length, 1))
        self.behind = P.Greater()
        self.before = P.Less()
        self.either = P.LogicalOr()
        self.windowed = window is not None and window < length
        if window is not None and window < length:
            self.first_seen = Tensor(np.maximum(places - window + 1, 0).reshape(1, 1, length, 1))
            self.later = P.Maximum()
        self.fused = fused
        self.far_below = P.Mul()
        self.reshape = P.Reshape()
        self.cast = P.Cast()

    def construct(self, segment_starts: Tensor | None) -> Tensor:
        hidden = self.behind(self.keys, self.queries)
        if segment_starts is not None:
            starts = self.reshape(segment_starts, (segment_starts.shape[0], 1, -1, 1))
            if self.windowed:
                starts = self.later(starts, self.first_seen)
            hidden = self.either(self.before(self.keys, starts), hidden)
        elif self.windowed:
            hidden = self.either(self.before(self.keys, self.first_seen), hidden)
        mask = self.cast(hidden, ms.uint8) if self.fused else self.far_below(self.cast(hidden, ms.float32), MASKED)
        return P.stop_gradient(mask)  # otherwise the compiler differentiates an exchange of integers


class AttentionTables(nn.Cell):
    """The tables and masks of all layers, one :class:`ContextTables` for each of the architecture's contexts.

    If documents are separated, each row has its own (:meth:`make_row_tables`).
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.contexts = nn.CellList(
            [ContextTables(context, model.seq_length, kernels) for context in model.architecture.contexts()]
        )
        if kernels.document_masks:
            self.gather = P.Gather()
            self.reshape = P.Reshape()

    def construct(self, context: int) -> tuple[Tables, Tensor]:
        return self.contexts[context]()

    def make_row_tables(
        self, segment_starts: Tensor | None, position_ids: Tensor | None
    ) -> tuple[tuple[Tables, Tensor], ...]:
        """Return the tables of each context for the documents of each row, computed once for all layers."""
        result: tuple[tuple[Tables, Tensor], ...] = ()
        for context in self.contexts:
            tables = context.positions()
            if tables:  # ALiBi's bias would differ by a constant per row only, which softmax cancels
                tables = (self.at_positions(tables[0], position_ids), self.at_positions(tables[1], position_ids))
            mask = context.document_mask(segment_starts) if context.masks_rows else context.attention_mask
            result = (*result, (tables, mask))
        return result

    def make_piece_tables(self, number: Tensor) -> tuple[tuple[Tables, Tensor], ...]:
        """Return the tables of each context for a piece of each sequence, computed once for all layers."""
        result: tuple[tuple[Tables, Tensor], ...] = ()
        for context in self.contexts:
            result = (*result, context.make_piece_tables(number))
        return result

    def at_positions(self, table: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return a table ``[seq, head_dim]`` at the positions of each row: ``[batch, 1, seq, head_dim]``."""
        if position_ids is None:
            return table
        rows = self.gather(table, self.reshape(position_ids, (-1,)), 0)
        return self.reshape(rows, (position_ids.shape[0], 1, -1, table.shape[-1]))


class Decoder(nn.Cell):
    """Token ids ``[batch, seq]`` -> hidden states ``[batch · seq, hidden]`` after the final norm.

    If layers add to the loss (``adds_to_loss``), hidden states come with the sum of these losses, ``[batch]``.

    ``segment_starts`` and ``position_ids``, both int32 ``[batch, seq]`` or None, separate the documents of a row: attention
    within a document only (:class:`DocumentMask`), and positions other than 0 to seq - 1.

    ``random``, int32 ``[batch, seq]``, has the keys of dropout and noise. Without it there is neither.

    ``table_of_layer`` is the copy of the tables that each layer reads. All layers share one here. If they are on different
    devices, each group of layers has a copy.

    ``prediction_ids``: for each prediction layer its token ids ``[batch, seq]``. Then the result is
    a tuple of hidden states, the decoder's and those of each such layer, and the loss that all layers add, or None. By default
    these layers are not computed.

    ``piece``, int32 ``[1]``: token ids are those of a piece of each sequence, ``[batch, seq / pieces]``, by its number.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        architecture, spread = model.architecture, InitStd.of(model)
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
            [_layer(number, model, kernels, spread) for number in range(len(architecture.layers))]
        )
        self.depth = len(architecture.main_layers)
        self.predictions = architecture.predictions
        if self.predictions:
            self.lookup_ahead = SharedEmbedding(model, kernels)
        self.norm_out = make_norm(model.hidden_size, architecture.final_norm, kernels)
        self.drops_embeddings = embedding.dropout > 0
        if self.drops_embeddings:
            self.embedding_dropout = Dropout(embedding.dropout, model.hidden_size, EMBEDDINGS, again=not kernels.cpu)
        self.drops = tuple(spec.drops for spec in architecture.layers)
        if any(self.drops):  # outside of layers, which are equal and compiled once
            self.dropout_keys = nn.CellList([Keys(number) for number in range(len(architecture.layers))])
        self.tables = nn.CellList([AttentionTables(model, kernels)])
        self.table_of_layer = (0,) * len(architecture.layers)
        contexts = architecture.contexts()
        self.context_of_layer = tuple(contexts.index(spec.attention.context) for spec in architecture.layers)
        self.adds_to_loss = any(spec.adds_to_loss for spec in architecture.main_layers)
        self.document_masks = kernels.document_masks

    def construct(
        self,
        input_ids: Tensor,
        prediction_ids: tuple[Tensor, ...] | None = None,
        segment_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        random: Tensor | None = None,
        piece: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | tuple[Tensor, ...], Tensor | None]:
        if not self.document_masks and not (segment_starts is None and position_ids is None):
            raise ValueError("the model was built without document_masks and cannot separate documents")
        batch = input_ids.shape[0]
        row_tables = self.all_row_tables(segment_starts, position_ids)
        if piece is not None:  # not a function: MindSpore 2.10 would confuse the layouts of the tables
            number = P.reshape(piece, ())
            for tables in self.tables:
                row_tables = (*row_tables, tables.make_piece_tables(number))
        # After the tables: readers of them wait for the embedding, also on stages of a pipeline without one.
        x = self.embedded(input_ids, batch, position_ids, random)
        added = None
        for index, layer in enumerate(self.layers):
            if index < self.depth:
                tables, mask = self.layer_tables(index, row_tables)
                keys = self.dropout_keys[index](random, x) if self.drops[index] and random is not None else None
                if layer.adds_to_loss:
                    x, added = layer(x, batch, tables, mask, added, keys)
                elif keys is not None:
                    x = layer(x, batch, tables, mask, None, keys)
                else:
                    x = layer(x, batch, tables, mask)
        hidden = self.norm_out(x)
        if prediction_ids is not None:
            return self.predicted(hidden, added, prediction_ids, row_tables, random)
        return (hidden, added) if self.adds_to_loss else hidden

    def predicted(
        self,
        hidden: Tensor,
        added: Tensor | None,
        prediction_ids: tuple[Tensor, ...],
        row_tables: tuple,
        random: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the hidden states after the final norm and those of each prediction layer, and the loss that all layers add."""
        states: tuple[Tensor, ...] = (hidden,)
        for index, layer in enumerate(self.layers):
            if index >= self.depth:
                tables, mask = self.layer_tables(index, row_tables)
                keys = self.dropout_keys[index](random, hidden) if self.drops[index] and random is not None else None
                ids = prediction_ids[index - self.depth]
                embedded = self.lookup_ahead(self.tok_embeddings.embedding_weight, ids)
                if layer.adds_to_loss:
                    hidden, added = layer(hidden, ids.shape[0], tables, mask, added, keys, embedded)
                else:
                    hidden = layer(hidden, ids.shape[0], tables, mask, None, keys, embedded)
                states = (*states, hidden)
        return states, added

    def all_row_tables(self, segment_starts: Tensor | None, position_ids: Tensor | None) -> tuple:
        """Return the tables of each copy if documents are separated, else an empty tuple."""
        row_tables: tuple = ()
        if self.document_masks:
            for tables in self.tables:
                row_tables = (*row_tables, tables.make_row_tables(segment_starts, position_ids))
        return row_tables

    def layer_tables(self, index: int, row_tables: tuple) -> tuple[Tables, Tensor]:
        """Return tables and mask of layer ``index``; ``row_tables``: those of each copy if documents are separated."""
        context, copy = self.context_of_layer[index], self.table_of_layer[index]
        return row_tables[copy][context] if row_tables else self.tables[copy](context)

    def embedded(
        self, input_ids: Tensor, batch: int, position_ids: Tensor | None, random: Tensor | None = None
    ) -> Tensor:
        """Return the input of the first layer, ``[batch · seq, hidden]``."""
        x = self.tok_embeddings(input_ids)
        if self.adds_noise:
            x = self.embedding_noise(x, random)
        if self.learns_positions:
            x = self.position_embeddings(x, batch, position_ids)
        if self.norms_embeddings:
            x = self.embedding_norm(x)
        return self.embedding_dropout(x, random) if self.drops_embeddings else x


def _layer(number: int, model: ModelConfig, kernels: Kernels, spread: InitStd) -> DecoderLayer:
    layers = model.architecture.layers
    spec, length = layers[number], model.seq_length
    if kernels.row_parts > 1:
        first, last = number == 0, number == len(layers) - 1
        opens, closes = number - 1 in kernels.joins, number in kernels.joins
        return FineGrainInterleavedLayer(spec, kernels, spread, length, first, last, opens, closes)
    return (MTPLayer if spec.is_mtp else DecoderLayer)(spec, kernels, spread, length)


def causal_mask(seq_length: int, kernels: Kernels, window: int | None = None) -> np.ndarray:
    """Return a mask of keys after the query, and of those more than ``window - 1`` before it.

    Composed attention: additive fp32 ``[seq, seq]``; flash attention: uint8, 1 = masked, ``[2048, 2048]`` for all lengths (the
    compressed form is always the triangle, windows are a number).
    """
    if kernels.flash_attention:
        return np.triu(np.ones((COMPRESSED_MASK_SIZE, COMPRESSED_MASK_SIZE), np.uint8), k=1)
    hidden = np.triu(np.ones((seq_length, seq_length), bool), k=1)
    if window is not None:
        hidden |= np.tril(np.ones((seq_length, seq_length), bool), k=-window)
    return np.where(hidden, MASKED, 0.0).astype(np.float32)
