"""GaLore (Zhao et al., 2024): AdamW of the matrices of layers on gradients that are projected to a few dimensions.

Of a gradient ``G [m, n]`` the projection has the first right singular vectors where ``m >= n``, ``P [rank, n]`` and ``G Pᵀ``,
else the left ones, ``P [m, rank]`` and ``Pᵀ G``. Moments have the projected shape; what they yield is projected back.
Projections are made anew from the gradient of every ``galore_update_proj_gap``-th step, moments stay. Projections, and the steps
since, are optimizer state. Other weights have AdamW's update.

Singular vectors are found by orthogonal iteration (Golub & Van Loan, section 8.2.4), because accelerators have matrix products
and QR, and no SVD. It finds the first ones of a gradient whose singular values differ, up to their signs.

On devices that share the model each has a part of a gradient. Projections are whole on a stage, moments are cut along
the longer side, as the weight is.

A device has a part of the gradient ``[m, n]``. Products over the longer side are sums over its parts. Parts of the shorter side
are put together where vectors are found, and added where a gradient is projected. Every device of a stage finds the same vectors:
it factorises the same sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.architecture.optimizer_state import MOMENTS, PROJECTION, STEPS_IN_INTERVAL, is_projected, projected_shapes
from mindllm.config import OptimizerConfig
from mindllm.config.tuning import PetConfig
from mindllm.models.experts.grouped_experts import first_input
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.part_exchange import JoinedParts, SumOverParts

ITERATIONS = 16
TINY = 1e-20  # nothing is divided by zero, and a gradient that is zero keeps the vectors of the start


class GaLoreMatrix(nn.Cell):
    """A matrix ``[m, n]``, or a device's part of it, and its projection: ``[rank, n]`` where ``m >= n``, else ``[m, rank]``.

    Args:
        cut: of the matrix.
        rank: this device.
    """

    def __init__(self, cut: WeightCut, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.cut_of_weight = cut
        self.tall = cut.shape[0] >= cut.shape[1]
        self.longer, self.shorter = (0, 1) if self.tall else (1, 0)
        self.over_longer, self.over_shorter = (SumOverParts(cut, side, rank) for side in (self.longer, self.shorter))
        self.join_shorter = JoinedParts(cut, self.shorter, rank)
        self.shorter_is_cut = cut.parts(self.shorter) > 1
        self.first, self.own = cut.first(self.shorter, rank), cut.part_shape[self.shorter]
        self.product, self.by_rows, self.by_columns = P.MatMul(), P.MatMul(transpose_b=True), P.MatMul(transpose_a=True)
        self.transpose, self.part = P.Transpose(), P.StridedSlice()
        # The compiler traces operators with whole tensors first; these are opened when all tensors are a device's parts.
        self.is_cut = not cut.is_whole
        self.low_of_parts = P.Morph(self.projected, first_input, first_input)
        self.back_of_parts = P.Morph(self.projected_back, first_input, first_input)
        self.vectors_of_parts = P.Morph(self.singular_vectors, first_input, first_input)

    def low_cut(self, rank: int) -> WeightCut:
        """The cut of a gradient that is projected to ``rank``: along the longer side, as the weight's."""
        cut = self.cut_of_weight
        shape = (cut.shape[0], rank) if self.tall else (rank, cut.shape[1])
        return replace(
            cut,
            shape=shape,
            split=cut.split if cut.split == self.longer else None,
            shards=cut.shards if self.tall else 1,
        )

    def low(self, moment: Tensor, gradient: Tensor, projection: Tensor) -> Tensor:
        """The projected gradient, in the shape of its ``moment``."""
        if self.is_cut:
            return self.low_of_parts(moment, gradient, projection)
        return self.projected(moment, gradient, projection)

    def back(self, weight: Tensor, low: Tensor, projection: Tensor) -> Tensor:
        """What was projected, in the shape of the ``weight``."""
        if self.is_cut:
            return self.back_of_parts(weight, low, projection)
        return self.projected_back(weight, low, projection)

    def vectors(self, projection: Tensor, gradient: Tensor, start: Tensor) -> Tensor:
        """A new projection from a gradient and orthonormal ``start [shorter side, rank]``, in the shape of the old one."""
        if self.is_cut:
            return self.vectors_of_parts(projection, gradient, start)
        return self.singular_vectors(projection, gradient, start)

    def projected(self, moment: Tensor, gradient: Tensor, projection: Tensor) -> Tensor:
        """:meth:`low` of a part."""
        own = self.own_part(projection)
        low = self.by_rows(gradient, own) if self.tall else self.by_columns(own, gradient)
        return self.over_shorter(low)

    def projected_back(self, weight: Tensor, low: Tensor, projection: Tensor) -> Tensor:
        """:meth:`back` of a part."""
        own = self.own_part(projection)
        return self.product(low, own) if self.tall else self.product(own, low)

    def own_part(self, projection: Tensor) -> Tensor:
        """The columns of ``[rank, n]``, or the rows of ``[m, rank]``, of this device's part."""
        if not self.shorter_is_cut:
            return projection
        last, (rows, columns) = self.first + self.own, projection.shape
        begin, end = ((0, self.first), (rows, last)) if self.tall else ((self.first, 0), (last, columns))
        return self.part(projection, begin, end, (1, 1))

    def singular_vectors(self, projection: Tensor, gradient: Tensor, start: Tensor) -> Tensor:
        """:meth:`vectors` of a part."""
        gradient = self.join_shorter(gradient)
        scale = ops.sqrt(self.over_longer(ops.reduce_sum(ops.square(gradient), ()))) + TINY
        scaled = gradient * (1.0 / scale)  # a CPU's kernels of division and transposition keep two indices per element
        product = self.by_columns if self.tall else self.by_rows
        square = self.over_longer(product(scaled, scaled))
        vectors = start
        for _ in range(ITERATIONS):
            vectors = ops.qr(self.product(square, vectors) + TINY * vectors)[0]
        return self.transpose(vectors, (1, 0)) if self.tall else vectors


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
        self.own, self.foreign = by_stage([item.name in elsewhere for item in weights])
        self.steps = Parameter(Tensor(0.0, ms.float32), name=STEPS_IN_INTERVAL, requires_grad=False)
        self.gap, self.scale = float(pet.galore_update_proj_gap), pet.galore_scale
        self.beta1, self.beta2 = config.betas
        self.eps, self.corrects = config.eps, config.bias_correction
        self.decays = tuple(config.decay_of(item.name, item.ndim) for item in weights)

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
        moved = weight - rate * (self.scale * back + self.decays[number] * weight)
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


def by_stage(elsewhere: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
