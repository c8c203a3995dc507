"""A decoder layer that takes its rows in parts outside attention, so that one part exchanges while another computes.

Between two attentions a model is a chain of products, norms and sums, row by row: output projection, feed-forward, and the next
layer's query, key and value projection. Cut into parts of the rows ``[batch · seq]``, the chains do not wait for each other, and
exchanges of tensor parallelism in one run beside products in another. Attention sees all rows. (MindFormers'
``fine_grain_interleave``; whole copies of the model are in ``parallel/pipeline.py``.)
"""

from __future__ import annotations

from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.layer import LayerSpec
from mindllm.models.attention.attention import Attention, Tables
from mindllm.models.decoder_layer import DecoderLayer
from mindllm.models.kernels import Kernels
from mindllm.models.weights import InitStd

Parts = tuple[Tensor, ...]
"""Hidden states ``[batch · seq / parts, hidden]``, each part of the rows as it goes from layer to layer."""


class RowPart(nn.Cell):
    """One of ``count`` equal parts of the rows of ``[rows, columns]``, the ``index``-th."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.index = index
        self.count = count
        self.slice = P.StridedSlice()

    def construct(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[0] // self.count, x.shape[1]
        return self.slice(x, (rows * self.index, 0), (rows * (self.index + 1), columns), (1, 1))


class FineGrainInterleavedLayer(DecoderLayer):
    """:class:`DecoderLayer` with a dense feed-forward, of whose rows ``kernels.row_parts`` parts go their own ways.

    The ``first`` layer of a model or stage is given all rows ``[batch · seq, hidden]`` and cuts them, the ``last`` one joins
    them; between layers they stay apart.
    """

    def __init__(
        self, spec: LayerSpec, kernels: Kernels, spread: InitStd, seq_length: int, first: bool, last: bool
    ) -> None:
        super().__init__(spec, kernels, spread, seq_length)
        if not isinstance(self.attention, Attention) or self.has_experts or self.drops:
            raise ValueError("rows are taken in parts by dense layers without dropout and with plain attention only")
        count = kernels.row_parts
        self.first, self.last = first, last
        if first:
            self.beside = nn.CellList([RowPart(index, count) for index in range(count)])
        else:
            self.join_query, self.join_key, self.join_value = P.Concat(axis=0), P.Concat(axis=0), P.Concat(axis=0)
        self.behind = nn.CellList([RowPart(index, count) for index in range(count)])
        if last:
            self.join = P.Concat(axis=0)

    def construct(
        self,
        x: Tensor | Parts,
        batch: int,
        tables: Tables,
        mask: Tensor,
        added: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor | Parts:
        query, key, value = self.projected(x)
        context = self.attention.attended(query, key, value, batch, tables, mask)
        parts: Parts = ()
        for index in range(len(self.behind)):
            given = self.beside[index](x) if self.first else x[index]
            attended = self.attention.wo(self.behind[index](context))
            parts = (*parts, self.after_feed_forward(self.after_attention(given, attended), batch))
        return self.join(parts) if self.last else parts

    def projected(self, x: Tensor | Parts) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[batch · seq, heads · d]`` of all rows."""
        if self.first:
            return self.attention.rows(self.attention_norm(x))
        queries: Parts = ()
        keys: Parts = ()
        values: Parts = ()
        for part in x:
            query, key, value = self.attention.rows(self.attention_norm(part))
            queries, keys, values = (*queries, query), (*keys, key), (*values, value)
        return self.join_query(queries), self.join_key(keys), self.join_value(values)
