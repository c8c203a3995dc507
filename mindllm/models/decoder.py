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

COMPRESSED_MASK_SIZE = 2048  # what FlashAttentionScore wants with a compressed causal mask
EMBEDDINGS, NOISE = 2, 5  # salts of the numbers that are drawn by, besides those of layers
MASKED = -1e9  # far below any score, and finite, so that a fully masked row stays finite


class Lookup(nn.Cell):
    """A lookup of token ids ``[batch, seq]`` in a table ``[vocab, hidden]`` -> ``[batch · seq, hidden]`` in hidden states' dtype,
    scaled where the architecture says.
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


class ContextTables(nn.Cell):
    """What layers of one context read: position tables for ``seq_length`` positions, and the mask.

    They are parameters without gradient: constants would be copied into the compiled graph once per use. Where documents are kept
    apart a mask is made for each row (:class:`DocumentMask`), and none is here.
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

    def of_piece(self, number: Tensor) -> tuple[Tables, Tensor]:
        """The same for a piece of each sequence, by its number, int32 ``[]``."""
        return self.piece(number, self.positions(), self.attention_mask)

    def positions(self) -> Tables:
        """What is read about positions."""
        if self.rotates:
            return (self.rotary_cos, self.rotary_sin)
        return ()


class DocumentMask(nn.Cell):
    """What a query of a row may not see, ``[batch, 1, seq, seq]``: keys behind it, those more than ``window - 1`` before it, and
    other documents. For the fused kernel uint8 with 1 = masked, else fp32 that is added to the scores.

    ``segment_starts``, int32 ``[batch, seq]``: where in its row the document of each token begins. Of a key before the query,
    that is all a query must know. Without them documents see each other, and one mask ``[1, 1, seq, seq]`` is for all rows.

    Numbers of places are compared, so no whole mask need be anywhere (of 131,072 tokens it has 16 GiB): devices that share a
    sequence have the rows of their queries. ``keys`` is a parameter, for the compiler would compare constants by itself.
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
            self.gather = P.Gather()
            self.reshape = P.Reshape()

    def construct(self, context: int) -> tuple[Tables, Tensor]:
        return self.contexts[context]()

    def of_rows(self, segment_starts: Tensor | None, position_ids: Tensor | None) -> tuple[tuple[Tables, Tensor], ...]:
        """The tables of each context as the documents of each row want them, made once for all layers."""
        made: tuple[tuple[Tables, Tensor], ...] = ()
        for context in self.contexts:
            tables = context.positions()
            if tables:  # ALiBi's bias differs by a number per row only, which no softmax sees: it stays as it is
                tables = (self.at_positions(tables[0], position_ids), self.at_positions(tables[1], position_ids))
            mask = context.document_mask(segment_starts) if context.masks_rows else context.attention_mask
            made = (*made, (tables, mask))
        return made

    def of_piece(self, number: Tensor) -> tuple[tuple[Tables, Tensor], ...]:
        """The tables of each context for a piece of each sequence, made once for all layers."""
        made: tuple[tuple[Tables, Tensor], ...] = ()
        for context in self.contexts:
            made = (*made, context.of_piece(number))
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

    ``ahead``: for each layer that predicts ahead, the token ids ``[batch, seq]`` as it is given them. Then the result is a tuple
    of hidden states, the decoder's and those of each such layer, and what all layers add to the loss, or None. Without
    ``ahead`` these layers are not computed.

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
        if any(self.drops):  # outside of layers, which are alike and compiled once
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
        segment_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        random: Tensor | None = None,
        ahead: tuple[Tensor, ...] | None = None,
        piece: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | tuple[Tensor, ...], Tensor | None]:
        if not self.document_masks and not (segment_starts is None and position_ids is None):
            raise ValueError("the model was built without document_masks and cannot keep documents apart")
        batch = input_ids.shape[0]
        of_rows = self.tables_of_rows(segment_starts, position_ids)
        if piece is not None:  # written out here: through a function MindSpore 2.10 confuses the layouts of the tables
            number = P.reshape(piece, ())
            for tables in self.tables:
                of_rows = (*of_rows, tables.of_piece(number))
        # Behind the tables: what reads them later waits for the embedding, also on places of a pipeline that have none.
        x = self.embedded(input_ids, batch, position_ids, random)
        added = None
        for index, layer in enumerate(self.layers):
            if index < self.depth:
                tables, mask = self.tables_of(index, of_rows)
                own = self.dropout_keys[index](random, x) if self.drops[index] and random is not None else None
                if layer.adds_to_loss:
                    x, added = layer(x, batch, tables, mask, added, own)
                elif own is not None:
                    x = layer(x, batch, tables, mask, None, own)
                else:
                    x = layer(x, batch, tables, mask)
        hidden = self.norm_out(x)
        if ahead is not None:
            return self.predicted(hidden, added, ahead, of_rows, random)
        return (hidden, added) if self.adds_to_loss else hidden

    def predicted(
        self, hidden: Tensor, added: Tensor | None, ahead: tuple[Tensor, ...], of_rows: tuple, random: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The hidden states behind the final norm, then those of each layer that predicts ahead, and what all add to the loss."""
        states: tuple[Tensor, ...] = (hidden,)
        for index, layer in enumerate(self.layers):
            if index >= self.depth:
                tables, mask = self.tables_of(index, of_rows)
                own = self.dropout_keys[index](random, hidden) if self.drops[index] and random is not None else None
                ids = ahead[index - self.depth]
                embedded = self.lookup_ahead(self.tok_embeddings.embedding_weight, ids)
                if layer.adds_to_loss:
                    hidden, added = layer(hidden, ids.shape[0], tables, mask, added, own, embedded)
                else:
                    hidden = layer(hidden, ids.shape[0], tables, mask, None, own, embedded)
                states = (*states, hidden)
        return states, added

    def tables_of_rows(self, segment_starts: Tensor | None, position_ids: Tensor | None) -> tuple:
        """Those of each copy of the tables where documents are kept apart, else nothing."""
        of_rows: tuple = ()
        if self.document_masks:
            for tables in self.tables:
                of_rows = (*of_rows, tables.of_rows(segment_starts, position_ids))
        return of_rows

    def tables_of(self, index: int, of_rows: tuple) -> tuple[Tables, Tensor]:
        """What layer ``index`` reads besides hidden states; ``of_rows``: that of each copy, where documents are kept apart."""
        context, copy = self.context_of_layer[index], self.table_of_layer[index]
        return of_rows[copy][context] if of_rows else self.tables[copy](context)

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


def _layer(number: int, model: ModelConfig, kernels: Kernels, spread: InitStd) -> DecoderLayer:
    layers = model.architecture.layers
    spec, length = layers[number], model.seq_length
    if kernels.row_parts > 1:
        first, last = number == 0, number == len(layers) - 1
        opens, closes = number - 1 in kernels.joins, number in kernels.joins
        return FineGrainInterleavedLayer(spec, kernels, spread, length, first, last, opens, closes)
    return (MTPLayer if spec.is_mtp else DecoderLayer)(spec, kernels, spread, length)


def causal_mask(seq_length: int, kernels: Kernels, window: int | None = None) -> np.ndarray:
    """Hides keys behind the query, and those more than ``window - 1`` before it.

    Composed attention: additive fp32 ``[seq, seq]``; flash attention: uint8, 1 = masked, ``[2048, 2048]`` for all lengths (the
    compressed form is the triangle in every case, windows are told by number).
    """
    if kernels.flash_attention:
        return np.triu(np.ones((COMPRESSED_MASK_SIZE, COMPRESSED_MASK_SIZE), np.uint8), k=1)
    hidden = np.triu(np.ones((seq_length, seq_length), bool), k=1)
    if window is not None:
        hidden |= np.tril(np.ones((seq_length, seq_length), bool), k=-window)
    return np.where(hidden, MASKED, 0.0).astype(np.float32)
