"""What a step counted of experts: kept for those who ask, and used to keep experts balanced without a loss.

The bias of an expert with fewer tokens than the mean grows, that of one with more shrinks (Wang et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindllm.models.experts.expert_load import PROBE, ROUTER_BIAS, is_probe

LOAD = "load."
AS_GOOD_AS_THE_MEAN = 1e-3  # relative: closer loads differ by rounding, which must not decide a sign
NONE = 1e-30  # in place of a sum that is zero

count = ops.MultitypeFuncGraph("count")
balance = ops.MultitypeFuncGraph("balance")


@count.register("Tensor", "Tensor", "Tensor")
def _count(coefficient, counted, gradient):
    return ops.assign(counted, gradient * coefficient)


@balance.register("Tensor", "Tensor", "Tensor", "Tensor")
def _balance(rate, done, bias, gradient):
    load = ops.depend(gradient, done)[: bias.shape[0]]
    mean = load.mean()
    missing = ops.round((mean - load) / (mean * AS_GOOD_AS_THE_MEAN))
    return ops.assign_add(bias, rate * ops.sign(missing))


class ExpertLoads(nn.Cell):
    """Keeps the counters' gradients of a step, and changes the biases beside them by ``bias_rate``."""

    def __init__(self, parameters: Sequence[Parameter], bias_rate: float) -> None:
        super().__init__(auto_prefix=False)
        found = {item.name: index for index, item in enumerate(parameters)}
        self.probes = tuple(index for name, index in found.items() if is_probe(name))
        self.counted = ParameterTuple([parameters[index] for index in self.probes]).clone(LOAD[:-1], init="zeros")
        biases = {name: name.replace(ROUTER_BIAS, PROBE) for name in found if name.endswith(ROUTER_BIAS)}
        self.balances = bias_rate > 0 and bool(biases)
        self.rate = Tensor(bias_rate, ms.float32)
        if self.balances:
            self.biases = ParameterTuple([parameters[found[name]] for name in biases])
            self.of_biases = tuple(found[probe] for probe in biases.values())
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, done: Tensor) -> tuple[Tensor, ...]:
        """``done``: what must have happened before biases change."""
        counted = tuple([gradients[index] for index in self.probes])
        kept = self.map(ops.partial(count, coefficient), self.counted, counted)
        if not self.balances:
            return kept
        of_biases = tuple([gradients[index] for index in self.of_biases])
        return kept + self.map(ops.partial(balance, self.rate, done), self.biases, of_biases)


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
