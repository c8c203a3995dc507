"""Cells that compute the health figures in a step: sums of squares of gradients, weights and updates, one per weight.

A rank returns the sums over its parts without communication. The host, which knows the layout, adds the parts up
(:mod:`mindllm.train.health`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.config import RunConfig
from mindllm.config.callbacks import GRADIENT, LOGIT, UPDATE, WEIGHT
from mindllm.models.attention.largest_logit import LOWEST, largest_logits
from mindllm.train.optimizers.adamw import AdamW, LastUpdate

SUMMED_KINDS = (GRADIENT, WEIGHT, UPDATE)
STEP_PREFIX = "step."  # of the names of parameters that keep the logits of a step

zeros_like = ops.auto_generate.ZerosLikeExt()  # other zeros are folded into constants, which are not sharded
sum_by_rows = ops.MultitypeFuncGraph("sum_by_rows")
sum_in_place = ops.MultitypeFuncGraph("sum_in_place")


@sum_by_rows.register("Tensor")
def _sum_by_rows(x):
    return ops.reduce_sum(ops.reduce_sum(ops.square(ops.cast(x, ms.float32)), -1), ())


@sum_in_place.register("Tensor", "Tensor")
def _sum_in_place(place, x):
    return place * ops.reduce_sum(ops.square(ops.cast(x, ms.float32)), ())


class WholeSquareSums(nn.Cell):
    """Sums of squares of whole tensors, fp32 ``[tensors]``."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.HyperMap()
        self.stack = P.Stack()

    def construct(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.stack(self.map(sum_by_rows, tensors))


class PartSquareSums(nn.Cell):
    """Sums of squares of a rank's parts, fp32 ``[columns]``; 0 for tensors of other stages, which the compiler drops.

    Args:
        places: column of each tensor.
        columns: number of columns.
    """

    def __init__(self, places: Sequence[int], columns: int) -> None:
        super().__init__(auto_prefix=False)
        self.places = tuple(Tensor(row) for row in np.eye(columns, dtype=np.float32)[list(places)])
        self.none = Tensor(np.zeros(columns, np.float32))
        self.map = ops.HyperMap()
        self.sum = P.AddN()

    def construct(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.sum((self.none, *self.map(sum_in_place, self.places, tensors)))


class HealthSums(nn.Cell):
    """``(gradients, rate) -> fp32 [kinds, weights]``, called after the update.

    Gradients are those of the backward pass: scaled by the loss scale, not clipped.

    Args:
        kinds: the tensors that are summed, from :data:`SUMMED_KINDS`, in its order.
        optimizer: the optimizer, which has updated the weights.
        columns: names of all weights of the model, of which this rank has parts; None if this rank has them whole.

    Attributes:
        kinds: kind of each row.
        names: weight of each column.
    """

    def __init__(self, kinds: Sequence[str], optimizer: nn.Cell, columns: Sequence[str] | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.weights = ParameterTuple([optimizer.parameters[index] for index in optimizer.updated])
        local_names = tuple(weight.name for weight in self.weights)
        self.kinds, self.names = tuple(kinds), local_names if columns is None else tuple(columns)
        self.squares = WholeSquareSums()
        if columns is not None:
            self.squares = PartSquareSums([self.names.index(name) for name in local_names], len(columns))
        self.sums_gradients, self.sums_weights, self.sums_updates = (kind in kinds for kind in SUMMED_KINDS)
        if self.sums_updates:
            assert isinstance(optimizer, AdamW)  # checked when the configuration is loaded
            self.last_update = LastUpdate(optimizer)
        self.stack = P.Stack()

    def construct(self, gradients: tuple[Tensor, ...], rate: Tensor) -> Tensor:
        rows: tuple[Tensor, ...] = ()
        if self.sums_gradients:
            rows = (*rows, self.squares(gradients))
        if self.sums_weights:
            rows = (*rows, self.squares(self.weights))
        if self.sums_updates:
            rows = (*rows, self.squares(self.last_update(rate)))
        return self.stack(rows)


keep_and_clear = ops.MultitypeFuncGraph("keep_and_clear")


@keep_and_clear.register("Tensor", "Tensor")
def _keep_and_clear(copy, largest):
    done = ops.assign(copy, largest)
    return ops.assign(largest, zeros_like(ops.depend(largest, done)) + LOWEST)


class StepLogits(nn.Cell):
    """Copies the largest logits of a step to ``step.*`` and resets them for the next step, after ``after``."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.largest = ParameterTuple(largest_logits(model))
        self.kept = self.largest.clone(prefix=STEP_PREFIX[:-1])
        for item in self.kept:
            item.is_constant = True
        self.map = ops.HyperMap()

    def reset(self) -> None:
        """Reset the logits between two steps."""
        for item in self.largest:
            item.copy_(Tensor(np.full(item.shape, LOWEST, np.float32)))

    def construct(self, after: Tensor) -> Tensor:
        return ops.depend(after, self.map(keep_and_clear, self.kept, self.largest))


def max_logits_by_layer(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the largest logit of each layer on this rank, by layer number. Layers of other stages are left out."""
    return {
        layer: largest
        for layer, value in head_logits_by_layer(values).items()
        if (largest := float(np.max(value))) > LOWEST / 2
    }


def head_logits_by_layer(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the largest logits of each layer, ``[heads]``, by layer number; initial values for layers of other stages."""
    return {
        name.split(".layers.")[1].split(".")[0]: value for name, value in values.items() if name.startswith(STEP_PREFIX)
    }


class Watch(nn.Cell):
    """``(gradients, rate, norm) -> (norm, sums)`` after the update; without ``sums`` only the norm.

    Args:
        sums: computes sums of squares, or None.
        logits: keeps the largest logits, or None.
    """

    def __init__(self, sums: HealthSums | None, logits: StepLogits | None) -> None:
        super().__init__(auto_prefix=False)
        self.sums, self.logits = sums, logits
        self.outputs = int(sums is not None)

    def construct(self, gradients: tuple[Tensor, ...], rate: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        if self.logits is not None:
            norm = self.logits(norm)
        if self.sums is None:
            return (norm,)
        return norm, self.sums(gradients, ops.depend(rate, norm))


def make_watch(config: RunConfig, model: nn.Cell, optimizer: nn.Cell, whole: bool) -> Watch | None:
    """Return the cell that computes the requested health figures, and keeps logits for qk-clip; None if neither is used.

    ``whole``: this device has the whole weights. Otherwise the sums have a column for every weight of the model.
    """
    figures = config.monitor_config.watched()
    kinds = summed_kinds(figures)
    keeps_logits = LOGIT in figures or config.optimizer.qk_clip_threshold is not None
    if not figures and not keeps_logits:
        return None
    sums = HealthSums(kinds, optimizer, None if whole else column_names(config)) if kinds else None
    return Watch(sums, StepLogits(model) if keeps_logits else None)


def summed_kinds(figures: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of tensors that are summed for these figures. An update is relative to the weights."""
    return tuple(kind for kind in SUMMED_KINDS if kind in figures or (kind == WEIGHT and UPDATE in figures))


def column_names(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the trained weights of the whole model, sorted."""
    return tuple(sorted(config.model.config.architecture.trained_shapes()))
