"""Loads of experts in a step: counted, and fed back into the next step to balance experts.

Without an auxiliary loss, the bias of an expert with fewer tokens than the mean increases, and that of one with more decreases
(Wang et al., 2024). An auxiliary loss over global batches gets the share of choices of each expert.
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
BALANCE_TOLERANCE = 1e-3  # relative; smaller differences are rounding errors
TINY = 1e-30  # avoids division by zero

count = ops.MultitypeFuncGraph("count")
change = ops.MultitypeFuncGraph("change")
first_of_all = P.StridedSlice()


@count.register("Tensor", "Tensor", "Tensor")
def _count(coefficient, counted, gradient):
    return ops.assign(counted, gradient * coefficient)


@change.register("Function", "Tensor", "Tensor", "Tensor")
def _change(by, done, parameter, gradient):
    """Update a value per expert from the tokens of each expert, after ``done``."""
    return by(parameter, first_of_all(ops.depend(gradient, done), (0,), parameter.shape, (1,)))


class BiasBalancing(nn.Cell):
    """Adds ``rate`` to the bias of each expert whose load is below the mean, and subtracts it above the mean."""

    def __init__(self, rate: float) -> None:
        super().__init__(auto_prefix=False)
        self.rate = Tensor(rate, ms.float32)

    def construct(self, bias: Tensor, load: Tensor) -> Tensor:
        mean = load.mean()
        missing = ops.round((mean - load) / (mean * BALANCE_TOLERANCE))
        return ops.assign_add(bias, self.rate * ops.sign(missing))


class LoadShares(nn.Cell):
    """Sets the share of all choices of each expert."""

    def construct(self, shares: Tensor, load: Tensor) -> Tensor:
        return ops.assign(shares, load / load.sum())


class LoadFeedback(nn.Cell):
    """Values per expert, fp32 ``[experts]``, that the cell ``by`` updates after each step from the counted tokens.

    ``counters``: index of the counter of each among the gradients.
    """

    def __init__(self, by: nn.Cell, parameters: Sequence[Parameter], counters: Sequence[int]) -> None:
        super().__init__(auto_prefix=False)
        self.by, self.parameters, self.counters = by, ParameterTuple(parameters), tuple(counters)
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], done: Tensor) -> tuple[Tensor, ...]:
        counted = tuple([gradients[index] for index in self.counters])
        return self.map(ops.partial(change, self.by, done), self.parameters, counted)


class ExpertLoads(nn.Cell):
    """Stores the counters of a step, updates expert biases by ``bias_rate`` and sets ``shares``."""

    def __init__(self, parameters: Sequence[Parameter], bias_rate: float, shares: Sequence[Parameter] = ()) -> None:
        super().__init__(auto_prefix=False)
        indices = {item.name: index for index, item in enumerate(parameters)}
        self.probes = tuple(index for name, index in indices.items() if is_probe(name))
        self.counted = ParameterTuple([parameters[index] for index in self.probes]).clone(LOAD[:-1], init="zeros")
        biases = [item for item in parameters if item.name.endswith(ROUTER_BIAS)]
        self.balances = bias_rate > 0 and bool(biases)
        if self.balances:
            counters = [indices[item.name.replace(ROUTER_BIAS, PROBE)] for item in biases]
            self.biases = LoadFeedback(BiasBalancing(bias_rate), biases, counters)
        self.sets_shares = bool(shares)
        if self.sets_shares:
            counters = [indices[item.name.replace(SHARES, PROBE)] for item in shares]
            self.shares = LoadFeedback(LoadShares(), shares, counters)
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, done: Tensor) -> tuple[Tensor, ...]:
        """Store counters; biases and shares change after ``done``."""
        counted = tuple([gradients[index] for index in self.probes])
        assigned = self.map(ops.partial(count, coefficient), self.counted, counted)
        if self.balances:
            assigned = assigned + self.biases(gradients, done)
        return assigned + self.shares(gradients, done) if self.sets_shares else assigned


@dataclass(frozen=True)
class LayerLoad:
    """Load of a layer in a step: the share of tokens that chose each expert, and the share of dropped choices."""

    layer: int
    shares: tuple[float, ...]
    dropped: float

    @property
    def largest(self) -> float:
        """Load of the busiest expert relative to the mean; 1 if all are equal."""
        return max(self.shares) * len(self.shares) / max(sum(self.shares), TINY)

    @property
    def max_violation(self) -> float:
        """MaxVio (Wang et al., 2024, equation 4): excess load of the busiest expert, relative to the mean."""
        return self.largest - 1.0

    @property
    def smallest(self) -> float:
        """Load of the least busy expert relative to the mean."""
        return min(self.shares) * len(self.shares) / max(sum(self.shares), TINY)

    def tokens(self, count: int) -> tuple[int, ...]:
        """Return how many of ``count`` tokens chose each expert."""
        return tuple(round(share * count) for share in self.shares)


def layer_loads(counted: Mapping[str, np.ndarray], chosen: int) -> list[LayerLoad]:
    """Return the loads of the layers on this stage from ``Engine.counts``. Each token chooses ``chosen`` experts.

    Counters of layers on other stages are zero and left out.
    """
    loads = []
    for name, values in counted.items():
        if not values.any() or not name.endswith(PROBE):
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        scale = chosen / max(float(values[:-1].sum()), TINY)
        loads.append(LayerLoad(layer, tuple(map(float, values[:-1] * scale)), float(values[-1]) * scale / chosen))
    return sorted(loads, key=lambda load: load.layer)
