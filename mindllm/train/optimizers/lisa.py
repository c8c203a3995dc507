"""LISA (Pan et al., 2024): every so many steps a few layers are drawn, which alone are updated beside what is in no layer.

Which layers an interval has is a function of (seed, number of the interval). Moments of layers begin anew with every interval,
and so does their correction, as if the optimizer had been made for it. What requires a gradient is a matter of compiling:
gradients of all layers are computed, those of the others are set to zero before the norm, and moments exist for all. The updates
are LISA's; the memory it saves is not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.architecture.optimizer_state import INTERVAL, LAYER_POWERS, MOMENTS, STEPS_IN_INTERVAL
from mindllm.config import OptimizerConfig
from mindllm.config.tuning import PetConfig
from mindllm.train.optimizers.adamw import AdamW, FusedAdam, decays_of

INTERVALS = 4096  # after so many of them the same draws come again
LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Maps over tuples, as those of AdamW: from these the compiler takes the weights that another pipeline stage has.
times = ops.MultitypeFuncGraph("times")
update_drawn = ops.MultitypeFuncGraph("update_drawn")


@times.register("Tensor", "Tensor")
def _times(factor, gradient):
    return gradient * factor


@update_drawn.register(
    "Function", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor",
    "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor",
)  # fmt: skip
def _update_drawn(
    kernel, goes_on, rate, correction1, correction2, coefficient, drawn, decay, weight, moment1, moment2, gradient
):
    """Updates a weight at a rate of zero if its layer was not drawn; moments begin anew where an interval begins."""
    cleared = ops.assign(moment1, moment1 * goes_on), ops.assign(moment2, moment2 * goes_on)
    rate = ops.depend(rate * drawn, cleared)
    return kernel(weight, moment1, moment2, rate, correction1, correction2, decay, gradient, coefficient)


def drawn_layers(seed: int, interval: int, layers: int, active: int) -> np.ndarray:
    """Which of the layers are trained in an interval: bool ``[layers]``, ``active`` of them true."""
    key = hashlib.sha256(f"{seed}:lisa:{interval}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    chosen = np.zeros(layers, bool)
    chosen[generator.choice(layers, active, replace=False)] = True
    return chosen


class LayerDraw(nn.Cell):
    """Gradients of a step, in which those of layers that were not drawn are zeros.

    Attributes:
        layer_of: number of the layer of every weight; -1 outside of layers.
        interval, steps: which interval this is, and how many steps of it are done; fp32.
    """

    def __init__(self, weights: Sequence[Parameter], pet: PetConfig, layers: int, seed: int) -> None:
        super().__init__(auto_prefix=False)
        found = [LAYER.match(item.name) for item in weights]
        self.layer_of = tuple(-1 if one is None else int(one[1]) for one in found)
        draws = np.stack([drawn_layers(seed, number, layers, pet.lisa_activated_layers) for number in range(INTERVALS)])
        self.draws = tuple(Tensor(column.astype(np.float32)) for column in draws.T)
        self.interval = Parameter(Tensor(0.0, ms.float32), name=INTERVAL, requires_grad=False)
        self.steps = Parameter(Tensor(0.0, ms.float32), name=STEPS_IN_INTERVAL, requires_grad=False)
        self.always = Tensor(1.0, ms.float32)
        self.gather = P.Gather()
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], unscale: Tensor) -> tuple[Tensor, ...]:
        return self.map(times, self.factors(), gradients)

    def factors(self) -> tuple[Tensor, ...]:
        """1 for every weight that is trained, 0 for the others."""
        drawn = self.drawn()
        found: tuple[Tensor, ...] = ()
        for layer in self.layer_of:
            found = (*found, self.always if layer < 0 else drawn[layer])
        return found

    def drawn(self) -> tuple[Tensor, ...]:
        """1 for every layer that is trained, 0 for the others."""
        row = ops.cast(self.interval - float(INTERVALS) * ops.floor(self.interval / float(INTERVALS)), ms.int32)
        found: tuple[Tensor, ...] = ()
        for draws in self.draws:
            found = (*found, self.gather(draws, row, 0))
        return found


class LisaAdamW(nn.Cell):
    """AdamW with the interface of :class:`mindllm.train.optimizers.adamw.AdamW`, of which drawn layers take part."""

    def __init__(
        self, parameters: Sequence[Parameter], config: OptimizerConfig, pet: PetConfig, layers: int, seed: int
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.counts, self.updated = False, tuple(range(len(parameters)))
        self.prepare = LayerDraw(parameters, pet, layers, seed)
        layer_of = self.prepare.layer_of
        self.outside = tuple(place for place, layer in enumerate(layer_of) if layer < 0)
        self.inside = tuple(place for place, layer in enumerate(layer_of) if layer >= 0)
        self.plain = AdamW([parameters[place] for place in self.outside], config)
        self.weights = ParameterTuple([parameters[place] for place in self.inside])
        self.moments1 = self.weights.clone(prefix=MOMENTS[0], init="zeros")
        self.moments2 = self.weights.clone(prefix=MOMENTS[1], init="zeros")
        self.power1 = Parameter(Tensor(1.0, ms.float32), name=LAYER_POWERS[0], requires_grad=False)
        self.power2 = Parameter(Tensor(1.0, ms.float32), name=LAYER_POWERS[1], requires_grad=False)
        self.decays = decays_of(self.weights, config)
        self.beta1, self.beta2 = config.betas
        self.length = float(pet.lisa_step_interval)
        self.kernel = FusedAdam(config)
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, rate: Tensor) -> Tensor:
        """One step; ``gradients`` of layers that were not drawn are zeros."""
        steps, interval = self.prepare.steps * 1.0, self.prepare.interval * 1.0
        goes_on = ops.cast(steps > 0.0, ms.float32)
        power1 = self.beta1 * (goes_on * self.power1 + 1.0 - goes_on)
        power2 = self.beta2 * (goes_on * self.power2 + 1.0 - goes_on)
        factors = self.prepare.factors()
        of_layers: tuple[Tensor, ...] = ()
        drawn: tuple[Tensor, ...] = ()
        for place in self.inside:
            of_layers, drawn = (*of_layers, gradients[place]), (*drawn, factors[place])
        common = ops.partial(update_drawn, self.kernel, goes_on, rate, 1.0 - power1, 1.0 - power2, coefficient)
        done = ops.depend(
            power1, self.map(common, drawn, self.decays, self.weights, self.moments1, self.moments2, of_layers)
        )
        of_others: tuple[Tensor, ...] = ()
        for place in self.outside:
            of_others = (*of_others, gradients[place])
        done = ops.depend(done, self.plain(of_others, coefficient, rate))
        ends = ops.cast(steps + 1.0 >= self.length, ms.float32)
        ops.assign(self.power1, ops.depend(power1, done))
        ops.assign(self.power2, ops.depend(power2, done))
        ops.assign(self.prepare.interval, ops.depend(interval + ends, done))
        ops.assign(self.prepare.steps, ops.depend((steps + 1.0) * (1.0 - ends), done))
        return done
