"""GaLore (Zhao et al., 2024): AdamW of the matrices of layers on gradients that are projected to a few dimensions.

Of a gradient ``G [m, n]`` the projection has the first right singular vectors where ``m >= n``, ``P [rank, n]`` and ``G Pᵀ``,
else the left ones, ``P [m, rank]`` and ``Pᵀ G``. Moments have the projected shape; what they yield is projected back.
Projections are made anew from the gradient of every ``galore_update_proj_gap``-th step, moments stay. Projections, and the steps
since, are optimizer state. Other weights have AdamW's update.

Singular vectors are found by orthogonal iteration (Golub & Van Loan, section 8.2.4), because accelerators have matrix products
and QR, and no SVD. It finds the first ones of a gradient whose singular values differ, up to their signs.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.config import OptimizerConfig
from mindllm.config.optimizer_state import MOMENTS, PROJECTION, STEPS_IN_INTERVAL, is_projected, projected_shapes
from mindllm.config.tuning import PetConfig
from mindllm.train.optimizer import AdamW

ITERATIONS = 16
TINY = 1e-20  # nothing is divided by zero, and a gradient that is zero keeps the vectors of the start


class SingularVectors(nn.Cell):
    """A matrix ``[m, n]`` and orthonormal ``start [n, rank]`` -> its first right singular vectors ``[n, rank]``."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.product = P.MatMul(transpose_a=True), P.MatMul()

    def construct(self, matrix: Tensor, start: Tensor) -> Tensor:
        scale = ops.sqrt(ops.reduce_sum(ops.square(matrix), ())) + TINY
        square = self.square(matrix / scale, matrix / scale)
        vectors = start
        for _ in range(ITERATIONS):
            vectors = ops.qr(self.product(square, vectors) + TINY * start)[0]
        return vectors


class ProjectedAdamW(nn.Cell):
    """The interface of :class:`mindllm.train.optimizer.AdamW`."""

    def __init__(self, parameters: Sequence[Parameter], config: OptimizerConfig, pet: PetConfig) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.counts, self.updated, self.prepare = False, tuple(range(len(parameters))), None
        shapes = {item.name: tuple(item.shape) for item in parameters}
        self.projected = tuple(n for n, item in enumerate(parameters) if is_projected(item.name, shapes[item.name]))
        self.others = tuple(n for n in range(len(parameters)) if n not in self.projected)
        self.plain = AdamW([parameters[place] for place in self.others], config)
        weights = [parameters[place] for place in self.projected]
        self.weights = ParameterTuple(weights)
        self.tall = tuple(item.shape[0] >= item.shape[1] for item in weights)
        kept = [projected_shapes(tuple(item.shape), pet.galore_rank) for item in weights]
        self.projections = ParameterTuple(
            [
                _zeros(f"{PROJECTION}.{item.name}", projection)
                for item, (projection, _) in zip(weights, kept, strict=True)
            ]
        )
        self.moments1, self.moments2 = (
            ParameterTuple([_zeros(f"{moment}.{item.name}", low) for item, (_, low) in zip(weights, kept, strict=True)])
            for moment in MOMENTS
        )
        self.starts = tuple(Tensor(_start(min(item.shape), pet.galore_rank)) for item in weights)
        self.steps = Parameter(Tensor(0.0, ms.float32), name=STEPS_IN_INTERVAL, requires_grad=False)
        self.gap, self.scale = float(pet.galore_update_proj_gap), pet.galore_scale
        self.beta1, self.beta2 = config.betas
        self.eps, self.decay, self.corrects = config.eps, config.weight_decay, config.bias_correction
        self.vectors = SingularVectors()
        self.product, self.by_rows, self.by_columns = P.MatMul(), P.MatMul(transpose_b=True), P.MatMul(transpose_a=True)
        self.transpose = P.Transpose()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, rate: Tensor) -> Tensor:
        """One step with ``coefficient * gradients``."""
        steps = self.steps * 1.0
        done = steps
        if steps == 0.0:
            done = ops.depend(done, self.refreshed(gradients))
        correction1 = 1.0 - self.plain.beta1_power * self.beta1 if self.corrects else Tensor(1.0, ms.float32)
        correction2 = 1.0 - self.plain.beta2_power * self.beta2 if self.corrects else Tensor(1.0, ms.float32)
        for number, place in enumerate(self.projected):
            weight, projection = self.weights[number], ops.depend(self.projections[number], done)
            gradient, tall = gradients[place], self.tall[number]
            low = self.by_rows(gradient, projection) if tall else self.by_columns(projection, gradient)
            low = low * coefficient  # of the gradient there would be a scaled copy for every weight at once
            moment1 = self.beta1 * self.moments1[number] + (1.0 - self.beta1) * low
            moment2 = self.beta2 * self.moments2[number] + (1.0 - self.beta2) * ops.square(low)
            step = (moment1 / correction1) / (ops.sqrt(moment2 / correction2) + self.eps)
            back = self.product(step, projection) if tall else self.product(projection, step)
            done = ops.depend(done, ops.assign(self.moments1[number], moment1))
            done = ops.depend(done, ops.assign(self.moments2[number], moment2))
            moved = weight - rate * (self.scale * back + self.decay * weight)
            done = ops.depend(done, ops.assign(weight, moved))
        of_others: tuple[Tensor, ...] = ()
        for place in self.others:
            of_others = (*of_others, gradients[place])
        done = ops.depend(done, self.plain(of_others, ops.depend(coefficient, done), rate))
        ends = ops.cast(steps + 1.0 >= self.gap, ms.float32)
        ops.assign(self.steps, ops.depend((steps + 1.0) * (1.0 - ends), done))
        return done

    def refreshed(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """New projections of all weights from their gradients."""
        done = self.steps * 1.0
        for number, place in enumerate(self.projected):
            gradient = ops.depend(gradients[place], done)  # one after the other: each has scaled and squared copies
            projection, start = self.projections[number], self.starts[number]
            if self.tall[number]:
                vectors = self.vectors(gradient, start)
                done = ops.depend(done, ops.assign(projection, self.transpose(vectors, (1, 0))))
            else:
                vectors = self.vectors(self.transpose(gradient, (1, 0)), start)
                done = ops.depend(done, ops.assign(projection, vectors))
        return done


def _zeros(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(initializer("zeros", shape, ms.float32), name=name, requires_grad=False)


def _start(width: int, rank: int) -> np.ndarray:
    """Orthonormal columns, always the same: ``[width, rank]``."""
    return np.linalg.qr(np.random.default_rng(0).normal(size=(width, rank)))[0].astype(np.float32)
