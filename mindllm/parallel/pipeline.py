"""Pipeline stages and micro batches (1F1B: Narayanan et al., 2019; interleaved chunks: Narayanan et al., 2021; chunks in a V:
Qi et al., 2024, 2405.15362).

Cells have the number of their stage. MindSpore's compiler cuts the graph there, inserts Send and Receive, and orders forward and
backward passes. A chunk that starts where stages begin again needs no mark. In a V two chunks follow each other on one stage, so
that every cell also has the number of its chunk: without it MindSpore 2.10 assumes the second.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import mindspore as ms
import numpy as np
from mindspore import Tensor, lazy_inline, nn
from mindspore import ops as P

# MindSpore has no public name for this operator, and its users (MindFormers among them) import it as well.
from mindspore.ops.operations.comm_ops import _VirtualDataset

from mindllm.config import ModelConfig
from mindllm.finetune.preference import PreferenceLoss
from mindllm.models import CausalLM, Kernels
from mindllm.models.decoder import AttentionTables, Decoder
from mindllm.models.weights import constant
from mindllm.parallel.layer_plan import LayerPlan
from mindllm.parallel.layout import DATA, Mesh
from mindllm.parallel.operators import cell_operators

FIRST_OPERATORS = ("gather", "down", "matmul", "norm")  # what multiplies by a weight, by its name in its cell
PIPELINE_MESSAGE = 2  # without groups of layers: the gradients of a stage are exchanged at its end


def place_on_stages(lm: CausalLM, plan: LayerPlan, model: ModelConfig, kernels: Kernels) -> None:
    """Puts embedding, layers, final norm, head and loss on their stages, and a copy of the tables on each stage.

    A parameter used on two stages would be sent from one to the other in every step. In a V each chunk has its own copy: what
    one chunk passes to the other on the same stage MindSpore 2.10 takes for a message.
    """

    place = partial(_place, plan)
    first, last = plan.places[0], plan.places[-1]
    for cell in _embedding_cells(lm.model):
        place(cell, *first)
    for number, (layer, assignment) in enumerate(zip(lm.model.layers, plan.layers, strict=True)):
        place(layer, assignment.chunk, assignment.stage)
        if any(lm.model.drops):
            place(lm.model.dropout_keys[number], assignment.chunk, assignment.stage)
    prediction_cells = (lm.model.lookup_ahead, *lm.ahead, *lm.prediction_losses) if lm.has_mtp else ()
    head_cells = (lm.lm_head, lm.unit_rows) if lm.normalised else (lm.lm_head,)
    for cell in (lm.model.norm_out, *head_cells, lm.cross_entropy, lm.losses, *prediction_cells):
        place(cell, *last)

    def tables_at(chunk: int, stage: int) -> tuple[int, int]:
        return (chunk, stage) if plan.v_shape else (0, stage)

    places = tuple(dict.fromkeys(tables_at(*at) for at in plan.places))
    lm.model.tables = nn.CellList([AttentionTables(model, kernels) for _ in places])
    for tables, at in zip(lm.model.tables, places, strict=True):
        place(tables, *at)
    lm.model.table_of_layer = tuple(places.index(tables_at(layer.chunk, layer.stage)) for layer in plan.layers)


def _place(plan: LayerPlan, cell: nn.Cell, chunk: int, stage: int) -> None:
    cell.pipeline_stage = stage
    if plan.v_shape:
        cell.pipeline_segment = chunk


def crossings(plan: LayerPlan) -> tuple[int, ...]:
    """Return the numbers of the layers that begin a later place of the pipeline."""
    at = [(layer.chunk, layer.stage) for layer in plan.layers]
    return tuple(number for number, (before, after) in enumerate(pairwise(at), 1) if after != before)


def place_pairs_on_stages(pairs_loss: PreferenceLoss, plan: LayerPlan) -> None:
    """Place the losses of pairs next to the head, and the cells that exchange hidden states at the ends of stages."""
    _place(plan, pairs_loss.pairs, *plan.places[-1])
    for number, join, parts in zip(pairs_loss.crossings, pairs_loss.joins, pairs_loss.parts, strict=True):
        before, after = plan.layers[number - 1], plan.layers[number]
        _place(plan, join, before.chunk, before.stage)
        _place(plan, parts, after.chunk, after.stage)


def _embedding_cells(decoder: Decoder) -> list[nn.Cell]:
    """Return the cells that compute the input of the first layer."""
    cells = [decoder.tok_embeddings]
    if decoder.adds_noise:
        cells.append(decoder.embedding_noise)
    if decoder.learns_positions:
        cells.append(decoder.position_embeddings)
    if decoder.norms_embeddings:
        cells.append(decoder.embedding_norm)
    if decoder.drops_embeddings:
        cells.append(decoder.embedding_dropout)
    return cells


def fuse_gradient_communication(lm: CausalLM, plan: LayerPlan, groups: int) -> None:
    """Give parameters whose gradients are exchanged in one message the same number (MindFormers' rule)."""
    predictions = lm.prediction_losses if lm.has_mtp else ()
    for cell in (*_embedding_cells(lm.model), lm.model.norm_out, lm.lm_head, *predictions):
        cell.set_comm_fusion(outer_fusion(plan, groups))
    for number, layer in enumerate(lm.model.layers):
        layer.set_comm_fusion(layer_fusion(number, plan, groups))


def layer_fusion(number: int, plan: LayerPlan, groups: int) -> int:
    """Return the number of the message with a layer's gradients."""
    per_group = max((len(plan.layers) + 1) // groups, 1)
    return PIPELINE_MESSAGE if plan.stages > 1 else number // per_group + 1


def outer_fusion(plan: LayerPlan, groups: int) -> int:
    """Return the number of the message with the gradients of embedding, final norm and head."""
    return PIPELINE_MESSAGE if plan.stages > 1 else groups


class SequenceOrder(nn.Cell):
    """Columns ``[batch, seq]`` in the order in which tokens stand where devices share sequences."""

    def __init__(self, positions: np.ndarray, mesh: Mesh) -> None:
        super().__init__(auto_prefix=False)
        self.positions = Tensor(positions)
        self.gather = P.Gather().shard((mesh.strategy((DATA, None)), (1,)))

    def construct(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arranged: tuple[Tensor, ...] = ()
        for column in columns:
            arranged = (*arranged, self.gather(column, self.positions, 1))
        return arranged


class Inputs(nn.Cell):
    """Passes the batch's columns to a network by position. ``sharded``: marks them as inputs of the dataset, so that they are
    split by ``dataset_strategy``.

    Columns are those of :func:`mindllm.parallel.context.input_columns`, in order. The keys of dropout, the last column of a model
    that ``drops``, are always an input, and passed on if ``drop`` is True. ``order``: the order of tokens, if it differs.
    """

    def __init__(
        self,
        network: nn.Cell,
        documents: bool,
        drops: bool,
        sharded: bool = True,
        order: SequenceOrder | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.arranges = order is not None
        if order is not None:
            self.order = order
        self.network = network
        self.sharded = sharded
        self.dataset = _VirtualDataset()
        self.documents, self.drops = documents, drops

    def construct(self, drop: bool, *columns: Tensor) -> Tensor:
        if self.sharded:
            columns = self.dataset(*columns)
        if self.arranges:
            columns = self.order(columns)
        if self.drops and not drop:
            columns = columns[:-1]
        if self.drops and drop and not self.documents:
            return self.network(columns[0], columns[1], columns[2], None, None, columns[3])
        return self.network(*columns)


class ReusedNetwork(nn.Cell):
    """A network that is compiled once and called once for every micro batch."""

    @lazy_inline
    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *columns: Tensor | None) -> Tensor:
        return self.network(*columns)


class RowPart(nn.Cell):
    """One of ``count`` equal parts of the rows of each column; columns that are not there are passed on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.slice = P.StridedSlice()

    def one(self, x: Tensor, index: int) -> Tensor:
        rows, columns = x.shape[0] // self.count, x.shape[1]
        return self.slice(x, (rows * index, 0), (rows * (index + 1), columns), (1, 1))

    def construct(self, index: int, columns: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        parts: tuple[Tensor | None, ...] = ()
        for column in columns:
            parts = (*parts, None if column is None else self.one(column, index))
        return parts


class Copies(nn.Cell):
    """Sum of the losses of ``count`` equal parts of the batch, each by separate operators (multi-copy parallel).

    The marks are those of ``nn.MicroBatchInterleaved``, by which the compiler overlaps communication of one copy with computation
    of another.
    """

    def __init__(self, network: nn.Cell, count: int) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.count = count
        self.parts = nn.CellList([RowPart(count) for _ in range(count)])
        for part in self.parts:
            part.slice.add_prim_attr("strided_slice_flag", True).add_prim_attr("interleave_num", count)
        self.add = P.Add().add_prim_attr("micro_interleaved_add_flag", True)

    def construct(self, *columns: Tensor | None) -> Tensor:
        total = 0.0
        for index in range(self.count):
            total = self.add(total, self.network(*self.parts[index](index, columns)))
        return total


class PieceOfSequence(nn.Cell):
    """One of ``count`` equal pieces of the sequences of each column ``[batch, seq]``."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.slice = P.StridedSlice().add_prim_attr("strided_slice_flag", True).add_prim_attr("seq_split_slice", True)

    def construct(self, index: int, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = ()
        for x in columns:
            rows, length = x.shape[0], x.shape[1] // self.count
            parts = (*parts, self.slice(x, (0, length * index), (rows, length * (index + 1)), (1, 1)))
        return parts


class Pieces(nn.Cell):
    """Sum of the losses of ``count`` pieces of each sequence, one after another (:mod:`mindllm.models.pieces`).

    By its mark on slices the compiler knows the pieces, and orders their passes. Their numbers are slices of a parameter: of
    constants it would make a network for each piece.
    """

    def __init__(self, network: nn.Cell, count: int) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.count = count
        self.parts = nn.CellList([PieceOfSequence(count) for _ in range(count)])
        self.numbers = constant("piece_numbers", np.arange(count, dtype=np.int32))
        self.number = P.StridedSlice().shard(((1,),))
        self.add = P.Add()

    def construct(self, *columns: Tensor) -> Tensor:
        total = 0.0
        for index in range(self.count):
            piece = self.number(self.numbers, (index,), (index + 1,), (1,))
            loss = self.network(*self.parts[index](index, columns), None, None, None, piece)
            total = self.add(total, loss)
        return total


class MicroBatches(nn.Cell):
    """Sum of the losses of ``count`` equal parts of the batch, one after another; inputs ``[batch, seq]``.

    In a pipeline the compiler schedules the parts over the stages. Without one they accumulate gradients, and the marks
    make each part's backward pass follow its forward pass. ``reuse`` compiles the network once for all parts. In a pipeline
    each part may go through it in ``pieces`` of its sequences.
    """

    def __init__(self, network: nn.Cell, count: int, pipeline: bool, reuse: bool, pieces: int = 1) -> None:
        super().__init__(auto_prefix=False)
        network = ReusedNetwork(network) if reuse else network
        self.network = Pieces(network, pieces) if pieces > 1 else network
        self.count = count
        self.part = RowPart(count)
        if not pipeline:
            self.part.slice.add_prim_attr("grad_accu_num", count)
        mark = "pipeline_end" if pipeline else "forward_end"
        self.add = [P.Add().add_prim_attr(mark, part) for part in range(count)]

    def construct(self, *columns: Tensor | None) -> Tensor:
        total = None
        for index in range(self.count):
            loss = self.network(*self.part(index, columns))
            total = loss if total is None else self.add[index](total, loss)
        return total


def mark_where_parts_end(lm: CausalLM) -> None:
    """Mark the operator whose gradient ends the backward pass of a part: the first one with a trained weight.

    MindSpore 2.10 marks the first one with any weight. If that is frozen it has no gradient, and compilation fails with "Cannot
    find grad_accumulation border node".
    """
    for _, cell in lm.cells_and_names():
        trained = any(parameter.requires_grad for parameter in cell.get_parameters(expand=False))
        operators = cell_operators(cell)
        first = next((name for name in FIRST_OPERATORS if name in operators), None)
        if trained and first:
            operators[first].add_prim_attr("first_parameter_cnode", 0)
            return


class TokenCount(nn.Cell):
    """Number of tokens of the whole global batch, fp32, from ``loss_mask``.

    ``slices`` is 1 where every rank holds the whole batch. Otherwise each of ``devices`` ranks holds one of ``slices``
    parts, and the parts are added over all ranks.
    """

    def __init__(self, slices: int, devices: int) -> None:
        super().__init__()
        self.sum = P.ReduceSum()
        self.sliced = slices > 1
        self.copies = devices / slices
        if self.sliced:
            self.add_ranks = P.AllReduce()

    def construct(self, loss_mask: Tensor) -> Tensor:
        tokens = self.sum(P.cast(loss_mask, ms.float32))
        if self.sliced:
            tokens = self.add_ranks(tokens) / self.copies
        return tokens
