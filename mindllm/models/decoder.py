"""The pre-norm decoder (Touvron et al., 2023): embedding, layers, final norm. One class for all families."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.models.attention import Attention
from mindllm.models.feed_forward import FeedForward
from mindllm.models.kernels import Kernels
from mindllm.models.norm import RMSNorm
from mindllm.models.rotary import rotary_tables
from mindllm.models.weights import normal_parameter

COMPRESSED_MASK_SIZE = 2048  # what FlashAttentionScore wants with a compressed causal mask
MASKED = -1e9  # far below any score, and finite, so that a fully masked row stays finite


class TokenEmbedding(nn.Cell):
    """``[batch, seq]`` token ids -> ``[batch · seq, hidden]`` in the activation dtype."""

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        shape = (model.vocab_size, model.hidden_size)
        self.embedding_weight = normal_parameter("embedding_weight", shape, model.initializer_range)
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.cast = P.Cast()
        self.output_dtype = kernels.activation

    def construct(self, input_ids: Tensor) -> Tensor:
        x = self.gather(self.embedding_weight, self.reshape(input_ids, (-1,)), 0)
        return self.cast(x, self.output_dtype)


class DecoderLayer(nn.Cell):
    """``x += attention(norm(x)); x += feed_forward(norm(x))`` on ``[batch · seq, hidden]``."""

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, kernels, model.layernorm_compute_type)
        self.attention = Attention(model, kernels)
        self.ffn_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, kernels, model.layernorm_compute_type)
        self.feed_forward = FeedForward(model, kernels)
        self.attention_add = P.Add()
        self.ffn_add = P.Add()

    def construct(self, x: Tensor, batch: int, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_add(x, self.attention(self.attention_norm(x), batch, cos, sin, mask))
        return self.ffn_add(x, self.feed_forward(self.ffn_norm(x)))


class AttentionTables(nn.Cell):
    """Cosines and sines of all positions and the causal mask, which every layer reads.

    They are parameters without gradient: constants would be copied into the compiled graph once per use.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        cos, sin = rotary_tables(model, model.seq_length)
        self.rotary_cos = constant("rotary_cos", cos)
        self.rotary_sin = constant("rotary_sin", sin)
        self.attention_mask = constant("attention_mask", causal_mask(model.seq_length, kernels))

    def construct(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotary_cos, self.rotary_sin, self.attention_mask


class DocumentMask(nn.Cell):
    """The causal mask ``[seq, seq]`` -> one for every row, ``[batch, 1, seq, seq]``, that hides earlier documents too.

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
        self.minimum = P.Minimum()

    def construct(self, segment_starts: Tensor, causal: Tensor) -> Tensor:
        starts = self.reshape(segment_starts, (segment_starts.shape[0], 1, -1, 1))
        hidden = self.less(self.columns, starts)
        causal = self.reshape(causal, (1, 1, *causal.shape))
        if causal.dtype == ms.uint8:
            return self.cast(self.maximum(self.cast(hidden, ms.int32), self.cast(causal, ms.int32)), ms.uint8)
        return self.minimum(self.cast(hidden, ms.float32) * MASKED, causal)


class Decoder(nn.Cell):
    """Token ids ``[batch, seq]`` -> hidden states ``[batch · seq, hidden]`` after the final norm.

    ``segment_starts`` and ``position_ids``, both int32 ``[batch, seq]`` or absent, keep the documents of a row apart:
    attention within a document only (:class:`DocumentMask`), and positions other than 0 to seq - 1.

    ``table_of_layer`` names the copy of the tables each layer reads. All share one here; where layers live on different
    devices there is a copy for each group of layers.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.tok_embeddings = TokenEmbedding(model, kernels)
        self.layers = nn.CellList([DecoderLayer(model, kernels) for _ in range(model.num_layers)])
        self.norm_out = RMSNorm(model.hidden_size, model.rms_norm_eps, kernels, model.layernorm_compute_type)
        self.tables = nn.CellList([AttentionTables(model, kernels)])
        self.table_of_layer = (0,) * model.num_layers
        self.document_masks = kernels.document_masks
        if self.document_masks:
            self.document_mask = DocumentMask(model.seq_length)
            self.gather = P.Gather()
            self.reshape = P.Reshape()

    def construct(
        self, input_ids: Tensor, segment_starts: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if not self.document_masks and not (segment_starts is None and position_ids is None):
            raise ValueError("the model was built without document_masks and cannot keep documents apart")
        batch = input_ids.shape[0]
        x = self.tok_embeddings(input_ids)
        of_rows = self.tables_of_rows(segment_starts, position_ids) if self.document_masks else ()
        for index, layer in enumerate(self.layers):
            cos, sin, mask = of_rows or self.tables[self.table_of_layer[index]]()
            x = layer(x, batch, cos, sin, mask)
        return self.norm_out(x)

    def tables_of_rows(
        self, segment_starts: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tables as the documents of each row want them, made once for all layers."""
        cos, sin, mask = self.tables[0]()
        if segment_starts is not None:
            mask = self.document_mask(segment_starts, mask)
        return self.at_positions(cos, position_ids), self.at_positions(sin, position_ids), mask

    def at_positions(self, table: Tensor, position_ids: Tensor | None) -> Tensor:
        """A table ``[seq, head_dim]`` at the positions of each row: ``[batch, 1, seq, head_dim]``."""
        if position_ids is None:
            return table
        rows = self.gather(table, self.reshape(position_ids, (-1,)), 0)
        return self.reshape(rows, (position_ids.shape[0], 1, -1, table.shape[-1]))


def constant(name: str, value: np.ndarray) -> Parameter:
    """A tensor that belongs to the graph but is neither trained nor saved."""
    return Parameter(Tensor(value), name=name, requires_grad=False)


def causal_mask(seq_length: int, kernels: Kernels) -> np.ndarray:
    """Composed attention: additive fp32 ``[seq, seq]``; flash attention: uint8, 1 = masked, ``[2048, 2048]`` for all lengths
    unless masks differ by row.
    """
    if kernels.flash_attention:
        size = seq_length if kernels.document_masks else COMPRESSED_MASK_SIZE
        return np.triu(np.ones((size, size), np.uint8), k=1)
    return np.triu(np.full((seq_length, seq_length), MASKED, np.float32), k=1)
