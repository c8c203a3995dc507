"""What a step counted of experts: kept for those who ask, and used to keep experts balanced in the next one.

Without a loss: the bias of an expert with fewer tokens than the mean grows, that of one with more shrinks (Wang et al., 2024).
By a loss over global batches: it is told the part of the choices that fell on each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.architecture.optimizer_state import SHARES
from mindllm.models.experts.expert_load import PROBE, ROUTER_BIAS, is_probe

LOAD = "load."
BALANCE_TOLERANCE = 1e-3  # relative: closer loads differ by rounding, which must not decide a sign
NONE = 1e-30  # in place of a sum that is zero

count = ops.MultitypeFuncGraph("count")
change = ops.MultitypeFuncGraph("change")
first_of_all = P.StridedSlice()


@count.register("Tensor", "Tensor", "Tensor")
def _count(coefficient, counted, gradient):
    return ops.assign(counted, gradient * coefficient)


@change.register("Function", "Tensor", "Tensor", "Tensor")
def _change(by, done, parameter, gradient):
    """What the tokens of each expert make of a number per expert, when ``done`` is there."""
    return by(parameter, first_of_all(ops.depend(gradient, done), (0,), parameter.shape, (1,)))


class BiasBalancing(nn.Cell):
    """Adds ``rate`` to the bias of each expert whose load is below the mean, and takes it from those above."""

    def __init__(self, rate: float) -> None:
        super().__init__(auto_prefix=False)
        self.rate = Tensor(rate, ms.float32)

    def construct(self, bias: Tensor, load: Tensor) -> Tensor:
        mean = load.mean()
        missing = ops.round((mean - load) / (mean * BALANCE_TOLERANCE))
        return ops.assign_add(bias, self.rate * ops.sign(missing))


class LoadShares(nn.Cell):
    """Sets the part of all choices that fell on each expert."""

    def construct(self, shares: Tensor, load: Tensor) -> Tensor:
        return ops.assign(shares, load / load.sum())


class LoadFeedback(nn.Cell):
    """Numbers per expert, fp32 ``[experts]``, which ``by`` changes after each step by what was counted beside them.

    ``counters``: the place of each one's counter among the gradients.
    """

    def __init__(self, by: nn.Cell, parameters: Sequence[Parameter], counters: Sequence[int]) -> None:
        super().__init__(auto_prefix=False)
        self.by, self.parameters, self.counters = by, ParameterTuple(parameters), tuple(counters)
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], done: Tensor) -> tuple[Tensor, ...]:
        counted = tuple([gradients[index] for index in self.counters])
        return self.map(ops.partial(change, self.by, done), self.parameters, counted)


class ExpertLoads(nn.Cell):
    """Keeps the counters' gradients of a step, changes the biases beside them by ``bias_rate``, and sets ``shares`` by them."""

    def __init__(self, parameters: Sequence[Parameter], bias_rate: float, shares: Sequence[Parameter] = ()) -> None:
        super().__init__(auto_prefix=False)
        found = {item.name: index for index, item in enumerate(parameters)}
        self.probes = tuple(index for name, index in found.items() if is_probe(name))
        self.counted = ParameterTuple([parameters[index] for index in self.probes]).clone(LOAD[:-1], init="zeros")
        biases = [item for item in parameters if item.name.endswith(ROUTER_BIAS)]
        self.balances = bias_rate > 0 and bool(biases)
        if self.balances:
            counters = [found[item.name.replace(ROUTER_BIAS, PROBE)] for item in biases]
            self.biases = LoadFeedback(BiasBalancing(bias_rate), biases, counters)
        self.remembers = bool(shares)
        if self.remembers:
            counters = [found[item.name.replace(SHARES, PROBE)] for item in shares]
            self.shares = LoadFeedback(LoadShares(), shares, counters)
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, done: Tensor) -> tuple[Tensor, ...]:
        """``done``: what must have happened before biases and shares change."""
        counted = tuple([gradients[index] for index in self.probes])
        kept = self.map(ops.partial(count, coefficient), self.counted, counted)
        if self.balances:
            kept = kept + self.biases(gradients, done)
        return kept + self.shares(gradients, done) if self.remembers else kept


@dataclass(frozen=True)
class LayerLoad:
    """The load of a layer in a step: the part of the tokens that chose each expert, and the part of choices that was dropped."""

    layer: int
    shares: tuple[float, ...]
    dropped: float

    @property
    def largest(self) -> float:
        """The load of the busiest expert relative to the mean: 1 where all are alike."""
        return max(self.shares) * len(self.shares) / max(sum(self.shares), NONE)

    @property
    def max_violation(self) -> float:
        """MaxVio (Wang et al., 2024, equation 4): how far the busiest expert is above the mean, relative to the mean."""
        return self.largest - 1.0

    @property
    def smallest(self) -> float:
        """The same of the idlest expert."""
        return min(self.shares) * len(self.shares) / max(sum(self.shares), NONE)

    def tokens(self, count: int) -> tuple[int, ...]:
        """Of ``count`` tokens, those that chose each expert."""
        return tuple(round(share * count) for share in self.shares)


def layer_loads(counted: Mapping[str, np.ndarray], chosen: int) -> list[LayerLoad]:
    """What ``Engine.counts`` gave of experts, by layer; a token chooses ``chosen`` experts.

    A counter that is zero is that of a layer on another stage.
    """
    loads = []
    for name, values in counted.items():
        if not values.any() or not name.endswith(PROBE):
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        scale = chosen / max(float(values[:-1].sum()), NONE)
        loads.append(LayerLoad(layer, tuple(map(float, values[:-1] * scale)), float(values[-1]) * scale / chosen))
    return sorted(loads, key=lambda load: load.layer)
