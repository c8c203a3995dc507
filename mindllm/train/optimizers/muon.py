"""Muon (Jordan et al., 2024): momentum of the matrices of layers, made orthogonal by Newton-Schulz steps; AdamW of all others.
Of routed experts each has matrices of its own.

Of the momentum ``M [m, n]`` a step goes by ``rms · √max(m, n) · O``, where ``O`` has the singular vectors of ``M`` and singular
values near one. The factor gives its entries the root mean square that AdamW's have, so both share a learning rate (Liu et al.,
2025, "Muon is scalable for LLM training", section 2.2). Decay is decoupled. All is computed in fp32.

On devices that share the model each has a part of a matrix. Momentum is cut as the weight is. Every device puts the whole
matrix together, makes it orthogonal, and keeps its own part: so all ranks do the update of a single device. Of stacked experts a
device makes the matrices whole of which it has a part, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.architecture.optimizer_state import MUON_MOMENT, is_orthogonalised
from mindllm.config import OptimizerConfig
from mindllm.config.optimizer import GroupedLrSchedule
from mindllm.models.experts.expert_load import is_probe
from mindllm.models.experts.grouped_experts import first_input
from mindllm.models.weights import is_half
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.optimizers.galore import by_stage
from mindllm.train.optimizers.half_weights import clone_state, in_float32, put, value_types
from mindllm.train.optimizers.qk_clip import QkClip
from mindllm.train.part_exchange import JoinedParts

TINY = 1e-7  # a matrix of zeros stays one
MATRIX = 2  # dimensions
NOT_CLIPPED = -1


class OrthogonalMatrix(nn.Cell):
    """A matrix ``[m, n]``, or a device's part of it, with singular values near one; of ``[experts, m, n]`` each of the matrices.

    Args:
        cut: of the matrix, or of the stack.
        rank: this device.
        coefficients: ``a, b, c`` of every step, which maps a singular value ``s`` to ``a·s + b·s³ + c·s⁵``.
    """

    def __init__(self, cut: WeightCut, rank: int, coefficients: Sequence[tuple[float, float, float]]) -> None:
        super().__init__(auto_prefix=False)
        dimensions = len(cut.shape)
        rows, columns = self.sides = dimensions - 2, dimensions - 1
        self.tall = cut.shape[rows] > cut.shape[columns]
        self.coefficients = tuple(coefficients)
        self.join_columns, self.join_rows = JoinedParts(cut, columns, rank), JoinedParts(cut, rows, rank)
        self.joins = self.join_columns.exchanges or self.join_rows.exchanges
        begins = [cut.first(side, rank) if side in self.sides else 0 for side in range(dimensions)]
        ends = [begin + size for begin, size in zip(begins, cut.part_shape, strict=True)]
        self.begins, self.ends, self.strides = tuple(begins), tuple(ends), (1,) * dimensions
        product = P.MatMul if dimensions == MATRIX else P.BatchMatMul
        self.product, self.by_rows, self.by_columns = product(), product(transpose_b=True), product(transpose_a=True)
        self.length = P.ReduceSum(keep_dims=True)
        self.part = P.StridedSlice()
        # The compiler traces operators with whole tensors first; this is opened when all tensors are a device's parts.
        self.is_cut = not cut.is_whole
        self.of_parts = P.Morph(self.own_part, first_input, first_input)

    def construct(self, weight: Tensor, matrix: Tensor) -> Tensor:
        """In the shape of the ``weight``."""
        return self.of_parts(weight, matrix) if self.is_cut else self.orthogonal(matrix)

    def own_part(self, weight: Tensor, matrix: Tensor) -> Tensor:
        """Of a part the same part."""
        return self.own(self.orthogonal(self.join_rows(self.join_columns(matrix))))

    def own(self, whole: Tensor) -> Tensor:
        """This device's part of whole matrices. Operators of what is opened itself would have no scope in the graph."""
        if not self.joins:
            return whole
        return self.part(whole, self.begins, self.ends, self.strides)

    def orthogonal(self, matrix: Tensor) -> Tensor:
        """Newton-Schulz steps on whole matrices; products are squares of the shorter side."""
        norm = ops.sqrt(self.length(ops.square(matrix), self.sides))
        x = matrix * (1.0 / (norm + TINY))  # a CPU's kernel of division keeps two indices per element
        for a, b, c in self.coefficients:
            square = self.by_columns(x, x) if self.tall else self.by_rows(x, x)
            polynomial = b * square + c * self.product(square, square)
            x = a * x + (self.product(x, polynomial) if self.tall else self.product(polynomial, x))
        return x


class MuonAdamW(nn.Cell):
    """The interface of :class:`mindllm.train.optimizers.adamw.AdamW`.

    State: ``muon_m.*`` of the matrices of layers, AdamW's of all others.

    Args:
        cuts: of the parameters over the devices of a stage, by name; None: this device has all of them.
        rank: this device.
        elsewhere: weights of other pipeline stages, by name, which the compiler takes out of tuples.
        groups: learning rates of groups of weights.
        clip: scales heads whose logits have grown, behind the update of their weights; or None.
        bias_rate, shares: what balances experts, as AdamW has them.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        config: OptimizerConfig,
        cuts: Mapping[str, WeightCut] | None = None,
        rank: int = 0,
        elsewhere: Collection[str] = (),
        groups: GroupedLrSchedule | None = None,
        clip: QkClip | None = None,
        bias_rate: float = 0.0,
        shares: Sequence[Parameter] = (),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.prepare = None
        shapes = {item.name: tuple(item.shape) for item in parameters}
        self.places = tuple(n for n, item in enumerate(parameters) if is_orthogonalised(item.name, shapes[item.name]))
        self.others = tuple(n for n in range(len(parameters)) if n not in self.places)
        others = [parameters[place] for place in self.others]
        self.plain = AdamW(others, config, bias_rate, groups=groups, shares=shares)
        self.counts = self.plain.counts
        self.updated = tuple(n for n, item in enumerate(parameters) if not is_probe(item.name))
        weights = [parameters[place] for place in self.places]
        self.weights = ParameterTuple(weights)
        self.moments = clone_state(self.weights, MUON_MOMENT)
        self.types, self.in_half = value_types(weights), tuple(map(is_half, weights))
        cuts = cuts or {name: WeightCut(shape) for name, shape in shapes.items()}
        steps = config.newton_schulz
        self.matrices = nn.CellList([OrthogonalMatrix(cuts[item.name], rank, steps) for item in weights])
        self.scales = tuple(config.matched_adamw_rms * math.sqrt(max(item.shape[-MATRIX:])) for item in weights)
        self.decays = tuple(config.decay_of(item.name, item.ndim) for item in weights)
        self.own, self.foreign = by_stage([item.name in elsewhere for item in weights])
        self.momentum, self.nesterov = config.momentum, config.nesterov
        self.grouped = groups is not None and bool(groups.grouped)
        self.group_of = tuple(groups.group_of(item.name) if groups is not None else 0 for item in weights)
        self.clip, clipped = clip, {number: place for place, number in enumerate(clip.weights if clip else ())}
        self.clip_of = tuple(clipped.get(place, NOT_CLIPPED) for place in self.places)
        biases = [number for number in clipped if number in self.others]
        self.biases = ParameterTuple([parameters[number] for number in biases])
        self.types_of_biases, self.half_biases = value_types(self.biases), tuple(map(is_half, self.biases))
        self.clip_of_biases = tuple(clipped[number] for number in biases)

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, rate: Tensor) -> Tensor:
        """One step with ``coefficient * gradients``; with groups ``rate`` is a tuple, as AdamW's."""
        done = coefficient * 1.0
        maxima = self.clip.maxima(done) if self.clip is not None else done
        for number in self.own:
            done = self.stepped(number, gradients[self.places[number]], coefficient, rate, done, maxima)
        all_done: tuple[Tensor, ...] = (done,)
        for number in self.foreign:
            gradient = gradients[self.places[number]]
            all_done = (*all_done, self.stepped(number, gradient, coefficient, rate, coefficient, maxima))
        of_others: tuple[Tensor, ...] = ()
        for place in self.others:
            of_others = (*of_others, gradients[place])
        done = self.plain(of_others, ops.depend(coefficient, all_done), rate)
        for number in range(len(self.clip_of_biases)):
            bias = ops.depend(self.biases[number], done)
            if self.half_biases[number]:
                scaled = self.clipped(self.clip_of_biases[number], in_float32(bias), maxima)
                done = ops.depend(done, put(self.biases[number], scaled, self.types_of_biases[number]))
            else:
                scaled = self.clipped(self.clip_of_biases[number], bias, maxima)
                done = ops.depend(done, ops.assign(self.biases[number], scaled))
        return done

    def clipped(self, place: int, weight: Tensor, maxima: Tensor) -> Tensor:
        """A weight whose heads are scaled, number ``place`` of them, or one that is :data:`NOT_CLIPPED`."""
        if self.clip is None or place == NOT_CLIPPED:
            return weight
        return self.clip.scaled(place, weight, maxima)

    def stepped(self, number: int, gradient: Tensor, coefficient: Tensor, rate, done: Tensor, maxima: Tensor) -> Tensor:
        """One step of a matrix, which begins when ``done`` is there; a value that is there when it ends.

        One after the other: each has squares and whole matrices of its own. Operators run as early as their inputs allow, so
        what weight and momentum are multiplied by waits: otherwise these products of all matrices are there at once.
        """
        weight, before = self.weights[number], self.moments[number]
        coefficient = ops.depend(coefficient, done)
        if self.in_half[number]:
            weight, gradient = (
                in_float32(ops.depend(weight, coefficient)),
                in_float32(ops.depend(gradient, coefficient)),
            )
        gradient = gradient * coefficient
        moment = self.momentum * ops.depend(before, done) + gradient
        direction = gradient + self.momentum * moment if self.nesterov else moment
        step = self.matrices[number](weight, direction)
        own_rate = ops.depend(rate[self.group_of[number]] if self.grouped else rate, step)
        moved = weight - (own_rate * self.decays[number]) * weight - (own_rate * self.scales[number]) * step
        moved = self.clipped(self.clip_of[number], moved, maxima)
        done = ops.depend(coefficient, ops.assign(before, moment))
        if self.in_half[number]:
            return ops.depend(done, put(self.weights[number], moved, self.types[number]))
        return ops.depend(done, ops.assign(weight, moved))
