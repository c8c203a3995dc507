"""AdamW whose moments have 8 bits (Dettmers et al., 2022): codes of blocks of numbers, and a scale each (``dynamic_map``).

A step decodes the moments of a weight, updates them and the weight in fp32, and encodes them. Weights are updated one after the
other, so that numbers in fp32 are there of one at a time. Those with one axis, and small ones, have AdamW's own state.

On devices that share the model each has whole blocks of what it updates, or the run is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.architecture.optimizer_state import CODES, SCALES, is_in_codes, shape_of_scales
from mindllm.config import OptimizerConfig
from mindllm.config.optimizer import GroupedLrSchedule
from mindllm.errors import UserError
from mindllm.models.experts.expert_load import is_probe
from mindllm.models.experts.grouped_experts import first_input
from mindllm.models.weights import is_half
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.optimizers.dynamic_map import DECADES, dynamic_map, magnitudes
from mindllm.train.optimizers.galore import by_stage
from mindllm.train.optimizers.half_weights import in_float32, put, value_types

NORMAL = 1e-37  # added to scales: a block of zeros is divided by it
SMALLEST = 1e-7  # added to what a logarithm is taken of: the end of the lowest decade
TENTH = 1.0 / math.log(10.0)
SIGNED = (True, False)
"""Of both moments."""

Refusal = Callable[[str, str], UserError]
"""Makes an error of a key and of what is wrong with it."""


class BlockCodes(nn.Cell):
    """Codes of one moment of a device's part of a weight, in blocks of so many numbers, and back."""

    def __init__(self, signed: bool, block: int) -> None:
        super().__init__(auto_prefix=False)
        found = magnitudes(signed)
        self.block, self.signed, self.zero = block, signed, len(found.values) - 2
        self.values = Tensor(dynamic_map(signed))
        self.lower, self.upper = Tensor(found.lower), Tensor(found.upper)
        self.slopes, self.offsets = Tensor(found.slopes), Tensor(found.offsets)
        self.gather, self.largest = P.Gather(), P.ReduceMax(keep_dims=True)
        self.log, self.cast, self.size = P.Log(), P.Cast(), P.Abs()

    def decoded(self, like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """The moment, fp32 in the shape of ``like``."""
        values = self.gather(self.values, self.cast(codes, ms.int32), 0)
        return (values.reshape((-1, self.block)) * scales.reshape((-1, 1))).reshape(like.shape)

    def scales_of(self, like: Tensor, moment: Tensor) -> Tensor:
        """The largest magnitude of every block, in the shape of ``like``."""
        return self.largest(self.magnitude(moment), 1).reshape(like.shape)

    def encoded(self, like: Tensor, moment: Tensor, scales: Tensor) -> Tensor:
        """Codes in the shape of ``like``: the place on the line of its decade, and one more or less where that is nearer.

        No place is below zero before it is rounded, so the cast to a whole number rounds down.
        """
        sizes = self.magnitude(moment) * (1.0 / (scales.reshape((-1, 1)) + NORMAL))
        decade = self.cast(self.log(sizes + SMALLEST) * TENTH + float(DECADES), ms.int32)
        line = sizes * self.gather(self.slopes, decade, 0) + self.gather(self.offsets, decade, 0)
        place = self.cast(line, ms.int32)
        above = self.cast(sizes > self.gather(self.upper, place, 0), ms.int32)
        place = place + above - self.cast(sizes < self.gather(self.lower, place, 0), ms.int32)
        if self.signed:
            negative = self.cast(moment.reshape((-1, self.block)) < 0.0, ms.int32)
            place = ops.maximum(place * (1 - 2 * negative) + self.zero, 0)  # minus one has no code
        return self.cast(place, ms.uint8).reshape(like.shape)

    def magnitude(self, moment: Tensor) -> Tensor:
        """``[blocks, numbers of a block]``."""
        blocks = moment.reshape((-1, self.block))
        return self.size(blocks) if self.signed else blocks


class CodedMoment(nn.Cell):
    """The same for a part of a weight, in cells that are opened when all tensors are a device's parts; the compiler traces
    operators with whole tensors first.
    """

    def __init__(self, codes: BlockCodes, is_cut: bool) -> None:
        super().__init__(auto_prefix=False)
        self.codes, self.is_cut = codes, is_cut
        self.decoded_part = P.Morph(codes.decoded, first_input, first_input)
        self.scales_of_part = P.Morph(codes.scales_of, first_input, first_input)
        self.encoded_part = P.Morph(codes.encoded, first_input, first_input)

    def decoded(self, like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return self.decoded_part(like, codes, scales) if self.is_cut else self.codes.decoded(like, codes, scales)

    def scales_of(self, like: Tensor, moment: Tensor) -> Tensor:
        return self.scales_of_part(like, moment) if self.is_cut else self.codes.scales_of(like, moment)

    def encoded(self, like: Tensor, moment: Tensor, scales: Tensor) -> Tensor:
        return self.encoded_part(like, moment, scales) if self.is_cut else self.codes.encoded(like, moment, scales)


class AdamW8bit(nn.Cell):
    """The interface of :class:`mindllm.train.optimizers.adamw.AdamW`.

    State: ``adam_m_codes.*``, ``adam_v_codes.*`` (uint8, shapes of the weights), ``adam_m_scales.*``, ``adam_v_scales.*``
    (fp32, one for each block), AdamW's of all other weights.

    Args:
        cuts: of the parameters over the devices of a stage, by name; None: this device has all of them.
        rank: this device.
        elsewhere: weights of other pipeline stages, by name, which the compiler takes out of tuples.
        groups: learning rates of groups of weights.
        refusal: makes the error where a device would have parts of blocks.

    Attributes:
        layouts: of the state in codes and its scales, by name.

    Raises:
        UserError: a block would lie on several devices.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        config: OptimizerConfig,
        cuts: Mapping[str, WeightCut] | None = None,
        rank: int = 0,
        elsewhere: Collection[str] = (),
        groups: GroupedLrSchedule | None = None,
        refusal: Refusal = lambda key, problem: UserError(f"{key}: {problem}"),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.prepare = None
        shapes = {item.name: tuple(item.shape) for item in parameters}
        self.places = tuple(
            n
            for n, item in enumerate(parameters)
            if is_in_codes(shapes[item.name], config.block) and not is_probe(item.name)
        )
        self.others = tuple(n for n in range(len(parameters)) if n not in self.places)
        self.plain = AdamW([parameters[place] for place in self.others], config, groups=groups)
        self.counts = self.plain.counts
        self.updated = tuple(n for n, item in enumerate(parameters) if not is_probe(item.name))
        weights = [parameters[place] for place in self.places]
        self.weights = ParameterTuple(weights)
        of_weights = [(cuts or {}).get(item.name, WeightCut(shapes[item.name])) for item in weights]
        of_scales = [
            cut_of_scales(item.name, cut, config.block, refusal) for item, cut in zip(weights, of_weights, strict=True)
        ]
        names = [item.name for item in weights]
        self.codes1, self.codes2 = (_zeros(kind, names, of_weights, ms.uint8) for kind in CODES)
        self.scales1, self.scales2 = (_zeros(kind, names, of_scales, ms.float32) for kind in SCALES)
        self.layouts: dict[str, ParameterLayout] = {
            f"{kind}.{name}": cut.layout(rank)
            for kinds, found in ((CODES, of_weights), (SCALES, of_scales))
            for kind in kinds
            for name, cut in zip(names, found, strict=True)
        }
        both = [BlockCodes(signed, config.block) for signed in SIGNED]
        self.moments1, self.moments2 = (
            nn.CellList([CodedMoment(one, not cut.is_whole) for cut in of_weights]) for one in both
        )
        self.own, self.foreign = by_stage([name in elsewhere for name in names])
        self.types, self.in_half = value_types(weights), tuple(map(is_half, weights))
        self.beta1, self.beta2 = config.betas
        self.eps, self.corrects = config.eps, config.bias_correction
        self.decays = tuple(config.decay_of(item.name, item.ndim) for item in weights)
        self.grouped = groups is not None and bool(groups.grouped)
        self.group_of = tuple(groups.group_of(name) if groups is not None else 0 for name in names)

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, rate: Tensor) -> Tensor:
        """One step with ``coefficient * gradients``; with groups ``rate`` is a tuple, as AdamW's."""
        root, ratio = Tensor(1.0, ms.float32), Tensor(1.0, ms.float32)
        if self.corrects:
            root = ops.sqrt(1.0 - self.plain.beta2_power * self.beta2)
            ratio = root / (1.0 - self.plain.beta1_power * self.beta1)
        done = coefficient * 1.0
        for number in self.own:
            done = self.stepped(number, gradients[self.places[number]], coefficient, rate, root, ratio, done)
        all_done: tuple[Tensor, ...] = (done,)
        for number in self.foreign:
            gradient = gradients[self.places[number]]
            all_done = (*all_done, self.stepped(number, gradient, coefficient, rate, root, ratio, coefficient))
        of_others: tuple[Tensor, ...] = ()
        for place in self.others:
            of_others = (*of_others, gradients[place])
        return self.plain(of_others, ops.depend(coefficient, all_done), rate)

    def stepped(self, number: int, gradient: Tensor, coefficient: Tensor, rate, root, ratio, done: Tensor) -> Tensor:
        """One step of a weight, which begins when ``done`` is there; a value that is there when it ends.

        ``root`` and ``ratio``: of the corrections ``1 - βᵗ`` of both moments the root of the second, and that over the first.
        """
        weight, coefficient = self.weights[number], ops.depend(coefficient, done)
        if self.in_half[number]:
            weight, gradient = (
                in_float32(ops.depend(weight, coefficient)),
                in_float32(ops.depend(gradient, coefficient)),
            )
        codes1, codes2, scales1, scales2 = (
            self.codes1[number],
            self.codes2[number],
            self.scales1[number],
            self.scales2[number],
        )
        gradient = gradient * coefficient
        before1 = self.moments1[number].decoded(weight, ops.depend(codes1, done), ops.depend(scales1, done))
        before2 = self.moments2[number].decoded(weight, ops.depend(codes2, done), ops.depend(scales2, done))
        moment1 = self.beta1 * before1 + (1.0 - self.beta1) * gradient
        moment2 = self.beta2 * before2 + (1.0 - self.beta2) * ops.square(gradient)
        step = moment1 / (ops.sqrt(moment2) + self.eps * root)
        own_rate = ops.depend(rate[self.group_of[number]] if self.grouped else rate, step)
        moved = weight - (own_rate * self.decays[number]) * weight - (own_rate * ratio) * step
        if self.in_half[number]:
            done = ops.depend(coefficient, put(self.weights[number], moved, self.types[number]))
        else:
            done = ops.depend(coefficient, ops.assign(weight, moved))
        moment1 = ops.depend(moment1, done)
        largest1 = self.moments1[number].scales_of(scales1, moment1)
        found1 = self.moments1[number].encoded(codes1, moment1, largest1)
        done = ops.depend(done, (ops.assign(codes1, found1), ops.assign(scales1, largest1)))
        moment2 = ops.depend(moment2, done)
        largest2 = self.moments2[number].scales_of(scales2, moment2)
        found2 = self.moments2[number].encoded(codes2, moment2, largest2)
        return ops.depend(done, (ops.assign(codes2, found2), ops.assign(scales2, largest2)))


def cut_of_scales(name: str, cut: WeightCut, block: int, refusal: Refusal) -> WeightCut:
    """The cut of the scales of a weight's blocks.

    Raises:
        UserError: a block would lie on several devices.
    """
    shape, part = shape_of_scales(cut.shape, block), cut.part_shape
    of_rows = len(shape) == 1  # blocks reach over rows
    by_columns = cut.split is not None and cut.split > 0
    numbers = part[-1] if by_columns else math.prod(part)
    if numbers % block or (by_columns and of_rows):
        key = "parallel_config.model_parallel" if by_columns else "parallel.enable_parallel_optimizer"
        message = f"parts {list(part)} of {name} {list(cut.shape)} do not hold whole blocks of {block} moments"
        raise refusal(key, f"{message} of 8 bits; write a size that leaves them whole, or optimizer.state_bits: 32")
    return replace(cut, shape=shape)


def _zeros(kind: str, names: Sequence[str], cuts: Sequence[WeightCut], dtype: ms.Type) -> ParameterTuple:
    """A device's parts, which begin as zeros: a scale of zero makes zero of every code."""
    return ParameterTuple(
        [
            Parameter(initializer("zeros", cut.part_shape, dtype), name=f"{kind}.{name}", requires_grad=False)
            for name, cut in zip(names, cuts, strict=True)
        ]
    )
