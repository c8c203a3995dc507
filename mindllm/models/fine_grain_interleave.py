"""A decoder layer that computes its rows in parts outside attention, so that communication of one overlaps with another.

Between two attentions a model is a chain of products, norms and sums, row by row: output projection, feed-forward, and the next
layer's query, key and value projection. Cut into parts of the rows ``[batch · seq]``, the chains do not wait for each other, and
communication of tensor parallelism in one overlaps with products in another. Attention sees all rows. (MindFormers'
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
    """:class:`DecoderLayer` with a dense feed-forward, which takes its rows in ``kernels.row_parts`` parts outside attention.

    The first layer of the model cuts all rows ``[batch · seq, hidden]`` into parts, the last one joins them. Between layers of a
    stage the parts stay apart. Between stages they travel as one tensor: each device joins its rows and cuts them again in
    the next stage, without communication (MindFormers' ``skip_redistribution``).

    Args:
        spec, kernels, spread, seq_length: those of :class:`DecoderLayer`.
        first, last: whether it is the first or last layer of the model.
        opens_stage, closes_stage: whether it is the first or last layer of a stage inside the model.
    """

    def __init__(
        self,
        spec: LayerSpec,
        kernels: Kernels,
        spread: InitStd,
        seq_length: int,
        first: bool,
        last: bool,
        opens_stage: bool = False,
        closes_stage: bool = False,
    ) -> None:
        super().__init__(spec, kernels, spread, seq_length)
        if not isinstance(self.attention, Attention) or self.has_experts or self.drops:
            raise ValueError("rows are taken in parts by dense layers without dropout and with plain attention only")
        count = kernels.row_parts
        self.first, self.last = first, last
        self.opens_stage, self.closes_stage = opens_stage, closes_stage
        self.cuts, self.joins = first or opens_stage, last or closes_stage
        if self.cuts:
            self.beside = nn.CellList([RowPart(index, count) for index in range(count)])
        if not first:
            self.join_query, self.join_key, self.join_value = P.Concat(axis=0), P.Concat(axis=0), P.Concat(axis=0)
        self.behind = nn.CellList([RowPart(index, count) for index in range(count)])
        if self.joins:
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
        parts_in: Parts = ()
        for index in range(len(self.behind)):
            parts_in = (*parts_in, self.beside[index](x) if self.cuts else x[index])
        query, key, value = self.projected(x, parts_in)
        context = self.attention.attended(query, key, value, batch, tables, mask)
        parts: Parts = ()
        for index in range(len(self.behind)):
            attended = self.attention.wo(self.behind[index](context))
            parts = (*parts, self.after_feed_forward(self.after_attention(parts_in[index], attended), batch))
        return self.join(parts) if self.joins else parts

    def projected(self, x: Tensor | Parts, parts_in: Parts) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``[batch · seq, heads · d]`` of all rows, in the order of the sequence."""
        if self.first:
            return self.attention.rows(self.attention_norm(x))
        queries: Parts = ()
        keys: Parts = ()
        values: Parts = ()
        for part in parts_in:
            query, key, value = self.attention.rows(self.attention_norm(part))
            queries, keys, values = (*queries, query), (*keys, key), (*values, value)
        return self.join_query(queries), self.join_key(keys), self.join_value(values)
