"""QK-clip (Kimi Team, 2025, "Kimi K2", section 2.1): weights of heads whose logits have grown past a threshold are scaled back.

The largest logit ``S`` of a head over the global batch, scaled and masked, gives its factor ``min(1, threshold / S)``. Behind the
update the rows of its query and key are multiplied by powers of it (:mod:`mindllm.architecture.query_key_rows`), so that the same
inputs would give logits up to the threshold. Momentum stays as it is.

Layers keep the maxima of their own device (:mod:`mindllm.models.attention.largest_logit`); they are exchanged once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.architecture.query_key_rows import HALF, QueryKeyRows, query_key_rows
from mindllm.config import RunConfig
from mindllm.models.experts.grouped_experts import first_input
from mindllm.parallel.context import in_group
from mindllm.parallel.layout import CONTEXT, Mesh
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.optimizers.lisa import LAYER


class ScaledHeads(nn.Cell):
    """Rows of a weight ``[rows, …]``, or of a device's part of it, times the powers of their heads' factors.

    Args:
        rows: of the weight, in groups of heads.
        cut: of the weight.
        rank: this device.
        threshold: of the logits.
        layer: the row of its layer among the maxima.
        shared: puts heads together that ranks of a sequence have taken apart, or None.
    """

    def __init__(
        self,
        rows: QueryKeyRows,
        cut: WeightCut,
        rank: int,
        threshold: float,
        layer: int,
        shared: P.Primitive | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        neighbours = cut.ways if cut.split == 0 else 1
        self.groups, self.is_half = rows.groups // neighbours, rows.power == HALF
        own = np.arange(cut.part_shape[0]) + cut.first(0, rank)
        group = own // (cut.shape[0] // rows.groups)
        self.group = Tensor((group % self.groups).astype(np.int32))
        self.layer, self.dimensions = Tensor(layer, ms.int32), len(cut.shape)
        self.shared = shared
        self.layer_row, self.gather, self.reshape = P.Gather(), P.Gather(), P.Reshape()
        self.reduce_max, self.maximum, self.divide = P.ReduceMax(), P.Maximum(), P.RealDiv()
        self.sqrt, self.by_rows = P.Sqrt(), P.Mul()
        self.least = Tensor(threshold, ms.float32)
        # The compiler traces operators with whole tensors first; this is opened when all tensors are a device's parts.
        self.is_cut = not cut.is_whole or shared is not None
        self.of_parts = P.Morph(self.own_part, first_input, first_input)

    def construct(self, weight: Tensor, maxima: Tensor) -> Tensor:
        """``maxima``: fp32 ``[layers, heads]`` of this device's heads."""
        return self.of_parts(weight, maxima) if self.is_cut else self.scaled(weight, maxima)

    def own_part(self, weight: Tensor, maxima: Tensor) -> Tensor:
        """Operators of what is opened itself would have no scope in the graph; those of what it calls have."""
        return self.scaled(weight, maxima)

    def scaled(self, weight: Tensor, maxima: Tensor) -> Tensor:
        largest = self.layer_row(maxima, self.layer, 0)
        if self.shared is not None:
            largest = self.shared(largest)
        of_groups = self.reduce_max(self.reshape(largest, (self.groups, -1)), 1)
        factor = self.divide(self.least, self.maximum(of_groups, self.least))
        if self.is_half:
            factor = self.sqrt(factor)
        factor = self.gather(factor, self.group, 0)
        if self.dimensions > 1:
            factor = self.reshape(factor, (-1, 1))
        return self.by_rows(weight, factor)


class MaximumOverRanks(nn.Cell):
    """The largest of all processes' numbers ``[layers, heads]``: each has a row of a sum, for MindSpore 2.10 adds over the
    processes of a CPU job and does nothing else.
    """

    def __init__(self, rank: int, count: int) -> None:
        super().__init__(auto_prefix=False)
        self.own_row = Tensor(np.eye(count, dtype=np.float32)[rank].reshape(-1, 1, 1))
        self.all_reduce, self.reduce_max = P.AllReduce(), P.ReduceMax()

    def construct(self, x: Tensor) -> Tensor:
        return self.reduce_max(self.all_reduce(self.own_row * x), 0)


class QkClip(nn.Cell):
    """``maxima(after)`` of a step, and ``scaled`` weights of them.

    Args:
        parameters: that the optimizer updates.
        largest: what the layers of this stage keep, in their order.
        rows: of the weights that are scaled, by their names.
        cuts: of all weights.
        rank: this device.
        mesh: all devices; one for a replica.
        threshold: of the logits.
        exchanges_heads: ranks that share a sequence have some heads each where logits are computed.
        processes: of a job in which each has the whole model.

    Attributes:
        weights: the numbers of the parameters that are scaled.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        largest: Sequence[Parameter],
        rows: Mapping[str, QueryKeyRows],
        cuts: Mapping[str, WeightCut],
        rank: int,
        mesh: Mesh,
        threshold: float,
        exchanges_heads: bool = False,
        processes: int = 1,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.largest = ParameterTuple(largest)
        self.stack = P.Stack()
        sharing = mesh.context_parallel if exchanges_heads else 1
        shared = in_group(P.AllGather, mesh.ranks_along(CONTEXT, rank)) if sharing > 1 else None
        ranks = _alike(mesh, rank, mesh.model_parallel * sharing)
        self.exchanges = len(ranks) > 1 or processes > 1
        if processes > 1:
            self.of_all = MaximumOverRanks(rank, processes)
        elif self.exchanges:
            self.of_all = in_group(P.AllReduce, ranks, op=ops.ReduceOp.MAX)
        places = {_layer(item.name): place for place, item in enumerate(largest)}
        self.weights = tuple(
            number for number, item in enumerate(parameters) if item.name in rows and _layer(item.name) in places
        )
        names = [parameters[number].name for number in self.weights]
        self.heads = nn.CellList(
            [ScaledHeads(rows[name], cuts[name], rank, threshold, places[_layer(name)], shared) for name in names]
        )

    def maxima(self, after: Tensor) -> Tensor:
        """The largest logits of the step, fp32 ``[layers, heads]``, behind ``after``: of this device's heads, over all rows."""
        found: tuple[Tensor, ...] = ()
        for one in self.largest:
            found = (*found, ops.depend(one, after))
        stacked = self.stack(found)
        return self.of_all(stacked) if self.exchanges else stacked

    def scaled(self, place: int, weight: Tensor, maxima: Tensor) -> Tensor:
        """The weight number ``place`` of :attr:`weights`."""
        return self.heads[place](weight, maxima)


def make_qk_clip(
    parameters: Sequence[Parameter],
    largest: Sequence[Parameter],
    config: RunConfig,
    cuts: Mapping[str, WeightCut] | None,
    rank: int,
    elsewhere: frozenset[str],
    mesh: Mesh,
    processes: int,
) -> QkClip | None:
    """That of a run; None without ``optimizer.qk_clip_threshold``.

    ``cuts``: None where each of ``processes`` has the whole model. ``elsewhere``: weights of other stages.
    """
    threshold = config.optimizer.qk_clip_threshold
    if threshold is None:
        return None
    rows = query_key_rows(config.model.config.architecture)
    own = {name: one for name, one in rows.items() if name not in elsewhere}
    layers = {_layer(name) for name in own}
    here = sorted((item for item in largest if _layer(item.name) in layers), key=lambda item: _layer(item.name))
    cuts = cuts or {item.name: WeightCut(tuple(item.shape)) for item in parameters}
    return QkClip(parameters, here, own, cuts, rank, mesh, threshold, config.parallel_config.exchanges_heads, processes)


def _layer(name: str) -> int:
    """The number of the layer that a parameter belongs to."""
    found = LAYER.match(name)
    assert found is not None, name
    return int(found[1])


def _alike(mesh: Mesh, rank: int, parts: int) -> tuple[int, ...]:
    """The ranks of a stage that have the heads of ``rank``, which neighbours have in so many parts."""
    begin = rank - rank % mesh.stage_device_num
    return tuple(begin + other for other in range(mesh.stage_device_num) if other % parts == rank % parts)
