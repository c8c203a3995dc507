"""What a compiled step computes for the health figures: sums of squares of gradients, weights and updates, one for each weight.

A rank gives the sums of its own parts, and exchanges nothing for them: who has which part is known when graphs are compiled, and
the host adds up the parts of the whole (:mod:`mindllm.train.health`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.config import RunConfig
from mindllm.config.monitor import GRADIENT, LOGIT, UPDATE, WEIGHT
from mindllm.models.attention.largest_logit import LOWEST, largest_logits
from mindllm.train.optimizers.adamw import AdamW, LastUpdate

OF_WEIGHTS = (GRADIENT, WEIGHT, UPDATE)
STEP_PREFIX = "step."  # before the names of what a step has kept of the layers

zeros_like = ops.auto_generate.ZerosLikeExt()  # other zeros are folded into constants, of which no device has its part
sum_by_rows = ops.MultitypeFuncGraph("sum_by_rows")
sum_in_place = ops.MultitypeFuncGraph("sum_in_place")


@sum_by_rows.register("Tensor")
def _sum_by_rows(x):
    return ops.reduce_sum(ops.reduce_sum(ops.square(ops.cast(x, ms.float32)), -1), ())


@sum_in_place.register("Tensor", "Tensor")
def _sum_in_place(place, x):
    return place * ops.reduce_sum(ops.square(ops.cast(x, ms.float32)), ())


class SquaresOfWhole(nn.Cell):
    """A tuple of whole tensors -> their sums of squares, fp32 ``[tensors]``."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.map = ops.HyperMap()
        self.stack = P.Stack()

    def construct(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.stack(self.map(sum_by_rows, tensors))


class SquaresOfParts(nn.Cell):
    """The same of a rank's parts of tensors: 0 for those of other stages, which the compiler takes out of the tuple.

    Args:
        places: of the tensors among the columns.
        columns: their number.
    """

    def __init__(self, places: Sequence[int], columns: int) -> None:
        super().__init__(auto_prefix=False)
        self.places = tuple(Tensor(row) for row in np.eye(columns, dtype=np.float32)[list(places)])
        self.none = Tensor(np.zeros(columns, np.float32))
        self.map = ops.HyperMap()
        self.sum = P.AddN()

    def construct(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.sum((self.none, *self.map(sum_in_place, self.places, tensors)))


class WatchedSums(nn.Cell):
    """``(gradients of the weights, rate) -> fp32 [kinds, weights]``, called when the weights have been updated.

    Gradients are as they left the backward pass: scaled by the loss scale, and not clipped.

    Args:
        kinds: what is summed, of :data:`OF_WEIGHTS`, in its order.
        optimizer: has updated the weights.
        columns: names of the weights of the whole model, of which this rank has parts; None: its weights are whole.

    Attributes:
        kinds: what the rows are.
        names: of the weights that the columns are.
    """

    def __init__(self, kinds: Sequence[str], optimizer: nn.Cell, columns: Sequence[str] | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.weights = ParameterTuple([optimizer.parameters[index] for index in optimizer.updated])
        own = tuple(weight.name for weight in self.weights)
        self.kinds, self.names = tuple(kinds), own if columns is None else tuple(columns)
        self.squares = SquaresOfWhole()
        if columns is not None:
            self.squares = SquaresOfParts([self.names.index(name) for name in own], len(columns))
        self.of_gradients, self.of_weights, self.of_updates = (kind in kinds for kind in OF_WEIGHTS)
        if self.of_updates:
            assert isinstance(optimizer, AdamW)  # or loading had refused it
            self.last_update = LastUpdate(optimizer)
        self.stack = P.Stack()

    def construct(self, gradients: tuple[Tensor, ...], rate: Tensor) -> Tensor:
        rows: tuple[Tensor, ...] = ()
        if self.of_gradients:
            rows = (*rows, self.squares(gradients))
        if self.of_weights:
            rows = (*rows, self.squares(self.weights))
        if self.of_updates:
            rows = (*rows, self.squares(self.last_update(rate)))
        return self.stack(rows)


keep_and_clear = ops.MultitypeFuncGraph("keep_and_clear")


@keep_and_clear.register("Tensor", "Tensor")
def _keep_and_clear(kept, largest):
    done = ops.assign(kept, largest)
    return ops.assign(largest, zeros_like(ops.depend(largest, done)) + LOWEST)


class LogitsOfStep(nn.Cell):
    """Keeps what the layers found in a step as ``step.*``, and begins anew for the next one, behind ``after``."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.largest = ParameterTuple(largest_logits(model))
        self.kept = self.largest.clone(prefix=STEP_PREFIX[:-1])
        for item in self.kept:
            item.is_constant = True
        self.map = ops.HyperMap()

    def forget(self) -> None:
        """Begins anew, between two steps."""
        for item in self.largest:
            item.copy_(Tensor(np.full(item.shape, LOWEST, np.float32)))

    def construct(self, after: Tensor) -> Tensor:
        return ops.depend(after, self.map(keep_and_clear, self.kept, self.largest))


def max_logits_by_layer(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The largest logits among a rank's parameters, by the number of their layer; a layer of another stage has none."""
    return {
        layer: largest
        for layer, value in head_logits_by_layer(values).items()
        if (largest := float(np.max(value))) > LOWEST / 2
    }


def head_logits_by_layer(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same of each head, ``[heads]``; of a layer of another stage as they begin."""
    return {
        name.split(".layers.")[1].split(".")[0]: value for name, value in values.items() if name.startswith(STEP_PREFIX)
    }


class Watch(nn.Cell):
    """``(gradients, rate, norm) -> (norm, sums…)`` behind the update; the sums are an output where they are asked for.

    Args:
        sums: of squares, or None.
        logits: or None.
    """

    def __init__(self, sums: WatchedSums | None, logits: LogitsOfStep | None) -> None:
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
    """What the figures of the run need of a step of ``model``, and qk-clip of the logits; None where nothing is watched.

    ``whole``: its weights are on this device; else the columns of the sums are the weights of all devices.
    """
    figures = config.monitor_config.watched()
    kinds = summed_kinds(figures)
    keeps_logits = LOGIT in figures or config.optimizer.qk_clip_threshold is not None
    if not figures and not keeps_logits:
        return None
    sums = WatchedSums(kinds, optimizer, None if whole else column_names(config)) if kinds else None
    return Watch(sums, LogitsOfStep(model) if keeps_logits else None)


def summed_kinds(figures: Sequence[str]) -> tuple[str, ...]:
    """What is summed for these figures: an update is relative to the weights."""
    return tuple(kind for kind in OF_WEIGHTS if kind in figures or (kind == WEIGHT and UPDATE in figures))


def column_names(config: RunConfig) -> tuple[str, ...]:
    """The trained weights of the whole model, the same on all ranks, in the order of their names."""
    return tuple(sorted(config.model.config.architecture.trained_shapes()))
