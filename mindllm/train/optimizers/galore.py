"""GaLore (Zhao et al., 2024): AdamW of the matrices of layers on gradients that are projected to a few dimensions.

Of a gradient ``G [m, n]`` the projection has the first right singular vectors where ``m >= n``, ``P [rank, n]`` and ``G Pᵀ``,
else the left ones, ``P [m, rank]`` and ``Pᵀ G``. Moments have the projected shape; what they yield is projected back.
Projections are made anew from the gradient of every ``galore_update_proj_gap``-th step, moments stay. Projections, and the steps
since, are optimizer state. Other weights have AdamW's update.

Singular vectors are found by orthogonal iteration (Golub & Van Loan, section 8.2.4), because accelerators have matrix products
and QR, and no SVD. It finds the first ones of a gradient whose singular values differ, up to their signs.

On devices that share the model each has a part of a gradient (``galore_matrix.py``). Projections are whole on a stage, moments
are cut along the longer side, as the weight is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindllm.architecture.optimizer_state import MOMENTS, PROJECTION, STEPS_IN_INTERVAL, is_projected, projected_shapes
from mindllm.config import OptimizerConfig
from mindllm.config.tuning import PetConfig
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.optimizers.galore_matrix import GaLoreMatrix


class GaLoreAdamW(nn.Cell):
    """The interface of :class:`mindllm.train.optimizers.adamw.AdamW`.

    Args:
        cuts: of the parameters over the devices of a stage, by name; None: this device has all of them.
        rank: this device.
        elsewhere: weights of other pipeline stages, by name, which the compiler takes out of tuples.

    Attributes:
        layouts: of the state whose shape is not that of a weight, by name.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        config: OptimizerConfig,
        pet: PetConfig,
        cuts: Mapping[str, WeightCut] | None = None,
        rank: int = 0,
        elsewhere: Collection[str] = (),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.counts, self.updated, self.prepare = False, tuple(range(len(parameters))), None
        shapes = {item.name: tuple(item.shape) for item in parameters}
        self.projected = tuple(n for n, item in enumerate(parameters) if is_projected(item.name, shapes[item.name]))
        self.others = tuple(n for n in range(len(parameters)) if n not in self.projected)
        self.plain = AdamW([parameters[place] for place in self.others], config)
        weights = [parameters[place] for place in self.projected]
        self.weights = ParameterTuple(weights)
        cuts = cuts or {name: WeightCut(shape) for name, shape in shapes.items()}
        matrices = [GaLoreMatrix(cuts[item.name], rank) for item in weights]
        self.matrices = nn.CellList(matrices)
        kept = [projected_shapes(tuple(item.shape), pet.galore_rank) for item in weights]
        self.projections = ParameterTuple(
            [
                _zeros(f"{PROJECTION}.{item.name}", projection)
                for item, (projection, _) in zip(weights, kept, strict=True)
            ]
        )
        low = [matrix.low_cut(pet.galore_rank) for matrix in matrices]
        self.moments1, self.moments2 = (
            ParameterTuple(
                [_zeros(f"{moment}.{item.name}", cut.part_shape) for item, cut in zip(weights, low, strict=True)]
            )
            for moment in MOMENTS
        )
        self.layouts = _layouts([item.name for item in weights], low, [shape for shape, _ in kept], rank)
        widths = {min(item.shape) for item in weights}
        starts = {width: Tensor(_start(width, pet.galore_rank)) for width in widths}  # of all weights of a width
        self.starts = tuple(starts[min(item.shape)] for item in weights)
        self.own, self.foreign = _by_stage([item.name in elsewhere for item in weights])
        self.steps = Parameter(Tensor(0.0, ms.float32), name=STEPS_IN_INTERVAL, requires_grad=False)
        self.gap, self.scale = float(pet.galore_update_proj_gap), pet.galore_scale
        self.beta1, self.beta2 = config.betas
        self.eps, self.decay, self.corrects = config.eps, config.weight_decay, config.bias_correction

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, rate: Tensor) -> Tensor:
        """One step with ``coefficient * gradients``."""
        steps = self.steps * 1.0
        own: tuple[Tensor, ...] = ()
        for number in self.own:
            own = (*own, gradients[self.projected[number]])
        if steps == 0.0:
            own = self.refreshed(own)
        root, ratio = Tensor(1.0, ms.float32), Tensor(1.0, ms.float32)
        if self.corrects:
            root = ops.sqrt(1.0 - self.plain.beta2_power * self.beta2)
            ratio = root / (1.0 - self.plain.beta1_power * self.beta1)
        factors = (coefficient, rate, root, ratio)
        done = steps
        for place, number in enumerate(self.own):
            done = self.stepped(number, own[place], factors, done)
        all_done: tuple[Tensor, ...] = (done,)
        for number in self.foreign:
            gradient = gradients[self.projected[number]]
            all_done = (*all_done, self.stepped(number, gradient, factors, steps))
        of_others: tuple[Tensor, ...] = ()
        for place in self.others:
            of_others = (*of_others, gradients[place])
        done = self.plain(of_others, ops.depend(coefficient, all_done), rate)
        ends = ops.cast(steps + 1.0 >= self.gap, ms.float32)
        ops.assign(self.steps, ops.depend((steps + 1.0) * (1.0 - ends), done))
        return done

    def stepped(self, number: int, gradient: Tensor, factors: tuple[Tensor, ...], done: Tensor) -> Tensor:
        """One step of a matrix, which begins when ``done`` is there; a value that is there when it ends.

        ``factors``: coefficient of the gradient, learning rate, and of the corrections ``1 - βᵗ`` of both moments the root of
        the second and that root over the first. So one division is left: on a CPU each keeps two indices per element.
        """
        coefficient, rate, root, ratio = factors
        weight, projection = self.weights[number], ops.depend(self.projections[number], done)
        before1, before2 = self.moments1[number], self.moments2[number]
        low = self.matrices[number].low(before1, gradient, projection)
        low = low * coefficient  # of the gradient there would be a scaled copy for every weight at once
        moment1 = self.beta1 * before1 + (1.0 - self.beta1) * low
        moment2 = self.beta2 * before2 + (1.0 - self.beta2) * ops.square(low)
        step = moment1 / (ops.sqrt(moment2) + self.eps * root) * ratio
        back = self.matrices[number].back(weight, step, projection)
        done = ops.depend(done, ops.assign(before1, moment1))
        done = ops.depend(done, ops.assign(before2, moment2))
        moved = weight - rate * (self.scale * back + self.decay * weight)
        return ops.depend(done, ops.assign(weight, moved))

    def refreshed(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Makes projections of this stage's weights anew; their gradients, which are there when that is done.

        What a branch reads is copied before it where anything else reads it, too. So gradients go through the branch.
        """
        done = self.steps * 1.0
        for place, number in enumerate(self.own):  # one after the other: each has scaled and squared copies
            gradient = ops.depend(gradients[place], done)
            found = self.matrices[number].vectors(self.projections[number], gradient, self.starts[number])
            done = ops.depend(done, ops.assign(self.projections[number], found))
        after: tuple[Tensor, ...] = ()
        for gradient in gradients:
            after = (*after, ops.depend(gradient, done))
        return after


def _by_stage(elsewhere: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of weights of this stage, which are updated one after the other, and of other stages, each alone.

    MindSpore's compiler follows every path from a weight of another stage to the tuples it takes it out of, again and again where
    paths meet: through a chain of weights it would not come to an end. Nor does it mend the places of a tuple that a branch gives
    back, so such a tuple has weights of this stage alone.
    """
    own, foreign = (tuple(n for n, away in enumerate(elsewhere) if away is where) for where in (False, True))
    return own, foreign


def _layouts(
    names: Sequence[str], low: Sequence[WeightCut], projections: Sequence[tuple[int, ...]], rank: int
) -> dict[str, ParameterLayout]:
    """Those of moments, which are cut as ``low`` says, and of projections, which are whole; all by weight."""
    found: dict[str, ParameterLayout] = {}
    for name, cut, shape in zip(names, low, projections, strict=True):
        found |= {f"{moment}.{name}": cut.layout(rank) for moment in MOMENTS}
        found[f"{PROJECTION}.{name}"] = WeightCut(shape, devices=cut.devices).layout(rank)
    return found


def _zeros(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(initializer("zeros", shape, ms.float32), name=name, requires_grad=False)


def _start(width: int, rank: int) -> np.ndarray:
    """Orthonormal columns, always the same: ``[width, rank]``."""
    return np.linalg.qr(np.random.default_rng(0).normal(size=(width, rank)))[0].astype(np.float32)
