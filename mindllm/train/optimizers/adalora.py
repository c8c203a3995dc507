"""AdaLoRA (Zhang et al., 2023): which of the ranks of all adapters are kept, by what they matter to the loss.

An adapter is ``B diag(E) A``. Its rank i is a triplet: an entry of E, a row of A, a column of B. What an entry matters is the
mean over steps of ``|w · dL/dw|`` times the mean of how much that changes (equations 9 to 11); what a triplet matters is the sum
of its entry of E and the means over row and column. The budget, ranks of all adapters together, falls from the first to the
last one (section 3.3), and E of the triplets that matter least is set to zero. Where the paper is open, this does as PEFT does.

What is kept between steps are weights of checkpoints: both means, the ranks that were kept, and the steps taken.

On devices that share the model each has parts of A and B, of the layers of its stage; E is whole on a stage. Products of a matrix
with itself are added over the ranks that have the rest of it, and what triplets matter over all devices at once: so every one
knows the same numbers and removes the same ranks, of one budget for all stages. Whatever is made for each weight goes through
tuples, from which the compiler takes the weights of other stages. They are made by maps: a loop over weights is unrolled into a
graph for every turn, with all tuples so far among its inputs, and compiles in the square of the weights' number. Weights that are
cut alike have one cell, which is parsed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.architecture.optimizer_state import IMPORTANCE, KEPT_RANKS, STEPS_TAKEN, UNCERTAINTY, Triplets
from mindllm.config.tuning import PetConfig
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.part_exchange import SumOverDevices, SumOverParts, WholeRows

Cuts = Mapping[str, WeightCut]
"""By the name of a weight."""


OVERLAP_OF_FIRST, OVERLAP_OF_SECOND = "overlap_of_first", "overlap_of_second"
"""What is added up over parts of A and of B, as compiled graphs have it."""
penalised = ops.MultitypeFuncGraph("penalised")
counted = ops.MultitypeFuncGraph("counted")
chosen = ops.MultitypeFuncGraph("chosen")


class OrthogonalPenalty(nn.Cell):
    """Adds to gradients those of ``weight · mean(|A Aᵀ - 1|, |Bᵀ B - 1|)`` (equation 4; norms are Frobenius's).

    The gradient of ``|A Aᵀ - 1|`` is ``2 (A Aᵀ - 1) A / |A Aᵀ - 1|``; B may be in parts of its rows.

    Args:
        weights: all that the optimizer updates.
        cuts: of them over the devices of a stage.
        rank: this device.
    """

    def __init__(
        self, weights: Sequence[Parameter], groups: Sequence[Triplets], weight: float, cuts: Cuts, rank: int
    ) -> None:
        super().__init__(auto_prefix=False)
        self.weights = ParameterTuple(weights)
        by_name = {item.name: item for item in weights}
        together = {name: group.seconds for group in groups for name in group.seconds}
        self.together = tuple(
            ParameterTuple([by_name[name] for name in together.get(item.name, (item.name,))]) for item in weights
        )
        firsts, nothing = {group.first for group in groups}, NoPenalty()
        of_first = cache(lambda cut: FirstPenalty(cut, rank))
        of_second = cache(lambda parts, unit: SecondPenalty(parts, unit, rank))
        unit = cuts[groups[0].first].shape[0]
        self.kinds = tuple(
            of_first(cuts[item.name])
            if item.name in firsts
            else of_second(tuple(cuts[name] for name in together[item.name]), unit)
            if item.name in together
            else nothing
            for item in weights
        )
        self.share = 2.0 * weight / (2 * len(groups))
        self.map = ops.Map()

    def construct(self, gradients: tuple[Tensor, ...], unscale: Tensor) -> tuple[Tensor, ...]:
        """``unscale`` turns a gradient into that of the mean loss per token."""
        of_one = ops.partial(penalised, self.share / unscale)
        return self.map(of_one, self.kinds, self.together, self.weights, gradients)


@penalised.register("Tensor", "Function", "Tuple", "Tensor", "Tensor")
def _penalised(share, kind, together, weight, gradient):
    return kind(gradient, weight, together, share)


class NoPenalty(nn.Cell):
    """For weights that are none of an adapter's, and for the values of one."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, gradient: Tensor, weight: Tensor, together: tuple[Tensor, ...], share: Tensor) -> Tensor:
        return gradient


class FirstPenalty(nn.Cell):
    """A ``[rank, in]``, or a part of it: adds ``share · (A Aᵀ - 1) A / |A Aᵀ - 1|`` of that part to its gradient.

    Of some rows of A it is ``(A' Aᵀ) A - A'``: the unit matrix has no rows that fit whole and cut ones alike.
    """

    def __init__(self, cut: WeightCut, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.is_cut = cut.parts(0) > 1
        self.whole, self.over_columns = WholeRows(cut, rank, gathers=True), SumOverParts(cut, 1, rank, OVERLAP_OF_FIRST)
        self.unit = Tensor(np.eye(cut.shape[0], dtype=np.float32))
        self.by_rows, self.product = P.MatMul(transpose_b=True), P.MatMul()

    def construct(self, gradient: Tensor, weight: Tensor, together: tuple[Tensor, ...], share: Tensor) -> Tensor:
        whole = self.whole(weight)
        overlap = self.over_columns(self.by_rows(whole, whole)) - self.unit
        share = share / length(overlap)
        if self.is_cut:
            own = self.product(self.over_columns(self.by_rows(weight, whole)), whole) - weight
            return gradient + own * share
        return gradient + self.product(overlap * share, weight)


class SecondPenalty(nn.Cell):
    """B ``[out, rank]``, or a part of its rows: adds ``share · B (Bᵀ B - 1) / |Bᵀ B - 1|`` of that part to its gradient.

    Args:
        cuts: of the matrices that are one B ``together``, this one among them.
        unit: ranks of the adapter.
        rank: this device.
    """

    def __init__(self, cuts: Sequence[WeightCut], unit: int, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.over_rows = nn.CellList([SumOverParts(cut, 0, rank, OVERLAP_OF_SECOND) for cut in cuts])
        self.unit = Tensor(np.eye(unit, dtype=np.float32))
        self.by_columns, self.product = P.MatMul(transpose_a=True), P.MatMul()

    def construct(self, gradient: Tensor, weight: Tensor, together: tuple[Tensor, ...], share: Tensor) -> Tensor:
        overlap = -self.unit
        for number, part in enumerate(together):
            overlap = overlap + self.over_rows[number](self.by_columns(part, part))
        return gradient + self.product(weight, overlap * (share / length(overlap)))


def length(matrix: Tensor) -> Tensor:
    """Frobenius's norm."""
    return ops.sqrt(ops.reduce_sum(ops.square(matrix), ()))


class AdaLoraRankAllocator(nn.Cell):
    """Ends a step: weights as they are after the update, and the gradients they were updated with.

    Args:
        weights: all that the optimizer updates.
        total_steps: of the run.
        cuts: of the weights over the devices of a stage.
        rank: this device.
        several: whether there are devices that share the model.
    """

    def __init__(
        self,
        weights: Sequence[Parameter],
        groups: Sequence[Triplets],
        pet: PetConfig,
        total_steps: int,
        cuts: Cuts,
        rank: int,
        several: bool,
    ) -> None:
        super().__init__(auto_prefix=False)
        shares = _score_shares(groups, cuts, rank)
        places = [place for place, item in enumerate(weights) if item.name in shares]
        self.runs = _runs(places)
        members = [weights[place] for place in places]
        self.weights = ParameterTuple(members)
        self.importance = self.weights.clone(prefix=IMPORTANCE, init="zeros")
        self.uncertainty = self.weights.clone(prefix=UNCERTAINTY, init="zeros")
        self.steps = Parameter(Tensor(0.0, ms.float32), name=STEPS_TAKEN, requires_grad=False)
        self.shares = tuple(shares[item.name][1] for item in members)
        rows = [
            Tensor(row.reshape(len(groups), 1)) for row in np.eye(len(groups), dtype=np.float32)
        ]  # of [adapters, rank]
        self.rows = tuple(rows[shares[item.name][0]] for item in members)
        by_name = {item.name: item for item in members}
        self.values = ParameterTuple([by_name[group.values] for group in groups])
        self.numbers = tuple(Tensor(number, ms.int32) for number in range(len(groups)))
        self.kept = self.values.clone(prefix=KEPT_RANKS, init="ones")
        self.beta1, self.beta2 = pet.adalora_beta1, pet.adalora_beta2
        removed, chosen, counted, fixed = allocation_schedule(pet, len(groups), total_steps)
        self.last = total_steps
        self.removed = Tensor(removed.astype(np.int32))
        self.chosen, self.counted, self.fixed = (Tensor(item.astype(np.float32)) for item in (chosen, counted, fixed))
        self.everywhere = ScoresOfAll(len(groups), pet.adalora_init_r, several)
        self.count, self.choose = CountedScores(), ChosenRanks()
        self.sort, self.gather = P.Sort(), P.Gather()
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, after: Tensor) -> Tensor:
        """``gradients`` of all weights, which times ``coefficient`` moved them; ``after``: what is computed before."""
        step = ops.depend(self.steps, after) + 1.0
        at = ops.cast(ops.minimum(step, float(self.last)), ms.int32)
        counts, chooses, fixed = (self.gather(table, at, 0) for table in (self.counted, self.chosen, self.fixed))
        of_members: tuple[Tensor, ...] = ()
        for begin, end in self.runs:
            of_members = of_members + gradients[begin:end]
        count = ops.partial(
            counted, self.count, coefficient, counts * (1.0 - self.beta1), counts * (1.0 - self.beta2), after
        )
        scores = self.map(count, self.shares, self.rows, self.weights, self.importance, self.uncertainty, of_members)
        of_ranks = self.everywhere(scores)
        removed = self.gather(self.removed, at, 0)
        least = self.gather(self.sort(of_ranks.reshape((-1,)))[0], ops.maximum(removed - 1, 0), 0)
        all_stay = ops.cast(removed == 0, ms.float32)
        stay = ops.maximum(ops.cast(of_ranks > least, ms.float32), all_stay)
        masked = ops.maximum(chooses, fixed)
        choose = ops.partial(chosen, self.choose, stay, chooses, masked, 1.0 - masked, after)
        done = self.map(choose, self.numbers, self.values, self.kept)
        return ops.assign(self.steps, ops.depend(step, done))


@counted.register(
    "Function", "Tensor", "Tensor", "Tensor", "Tensor", "Function", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor"
)
def _counted(count, coefficient, part1, part2, after, share, row, weight, before, change, gradient):
    return count(coefficient, part1, part2, after, share, row, weight, before, change, gradient)


@chosen.register("Function", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor")
def _chosen(choose, stay, chooses, masked, rest, after, number, values, before):
    return choose(stay, chooses, masked, rest, after, number, values, before)


class CountedScores(nn.Cell):
    """Adds a step to both means of one weight; this rank's share of what it adds to the triplets, ``[adapters, rank]``."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.times, self.add, self.less, self.size = P.Mul(), P.Add(), P.Sub(), P.Abs()
        self.assign, self.depend = P.Assign(), P.Depend()

    def construct(self, coefficient, part1, part2, after, share, row, weight, before, change, gradient):
        matters = self.size(self.times(self.depend(weight, after), self.times(gradient, coefficient)))
        mean = self.add(before, self.times(part1, self.less(matters, before)))
        spread = self.add(change, self.times(part2, self.less(self.size(self.less(matters, mean)), change)))
        scores = self.times(row, share(self.times(mean, spread)))
        return self.depend(scores, (self.assign(before, mean), self.assign(change, spread)))


class ChosenRanks(nn.Cell):
    """Removes ranks from the values of one adapter."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.times, self.add = P.Gather(), P.Mul(), P.Add()
        self.assign, self.depend = P.Assign(), P.Depend()

    def construct(self, stay, chooses, masked, rest, after, number, values, before):
        kept = self.add(self.times(chooses, self.gather(stay, number, 0)), self.times(1.0 - chooses, before))
        left = self.times(self.depend(values, after), self.add(self.times(masked, kept), rest))
        return self.assign(values, left), self.assign(before, kept)


def _score_shares(groups: Sequence[Triplets], cuts: Cuts, rank: int) -> dict[str, tuple[int, nn.Cell]]:
    """By name of a weight: the number of its adapter, and what makes its share of the triplets' scores."""
    of_first = cache(lambda cut: FirstScores(cut, rank))
    of_values = cache(lambda copies: ValueScores(copies))
    of_second = cache(lambda copies, rows: SecondScores(copies, rows))
    found: dict[str, tuple[int, nn.Cell]] = {}
    for number, group in enumerate(groups):
        rows = sum(cuts[name].shape[0] for name in group.seconds)
        found[group.first] = number, of_first(cuts[group.first])
        found[group.values] = number, of_values(cuts[group.values].copies)
        found |= {name: (number, of_second(cuts[name].copies, rows)) for name in group.seconds}
    return found


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First and last but one of numbers that follow one another."""
    begins = [place for place in places if place - 1 not in places]
    ends = [place + 1 for place in places if place + 1 not in places]
    return tuple(zip(begins, ends, strict=True))


class FirstScores(nn.Cell):
    """This rank's share of what the triplets of one adapter matter, ``[rank]``, from what entries of its part of A matter."""

    def __init__(self, cut: WeightCut, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.rows = WholeRows(cut, rank, gathers=False)
        self.share = 1.0 / (cut.copies * cut.shape[1])
        self.sum, self.times = P.ReduceSum(), P.Mul()

    def construct(self, scores: Tensor) -> Tensor:
        return self.times(self.share, self.rows(self.sum(scores, 1)))


class ValueScores(nn.Cell):
    """The same from E, of which there are so many ``copies``."""

    def __init__(self, copies: int) -> None:
        super().__init__(auto_prefix=False)
        self.share, self.times = 1.0 / copies, P.Mul()

    def construct(self, scores: Tensor) -> Tensor:
        return self.times(self.share, scores)


class SecondScores(nn.Cell):
    """The same from a part of B, which has so many ``rows`` in all; there are ``copies`` of the part."""

    def __init__(self, copies: int, rows: int) -> None:
        super().__init__(auto_prefix=False)
        self.share = 1.0 / (copies * rows)
        self.sum, self.times = P.ReduceSum(), P.Mul()

    def construct(self, scores: Tensor) -> Tensor:
        return self.times(self.share, self.sum(scores, 0))


class ScoresOfAll(nn.Cell):
    """What the triplets of all adapters matter, ``[adapters, rank]``, from what each weight adds to them: added over all devices
    where ``several`` have shares of them.
    """

    def __init__(self, adapters: int, rank: int, several: bool) -> None:
        super().__init__(auto_prefix=False)
        self.several = several
        self.add = SumOverDevices((adapters, rank)) if several else P.AddN()

    def construct(self, of_weights: tuple[Tensor, ...]) -> Tensor:
        return self.add(of_weights)


def allocation_schedule(
    pet: PetConfig, adapters: int, total_steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """By step, from 0 to the last one: how many ranks are removed; whether ranks are chosen; whether importance is counted;
    whether the last choice is fixed.

    The budget falls with the third power of the time that is left between ``adalora_tinit`` and ``adalora_tfinal`` steps before
    the end.
    """
    steps = np.arange(total_steps + 1)
    begin, end = pet.adalora_tinit, total_steps - pet.adalora_tfinal
    first, last = pet.adalora_init_r * adapters, pet.adalora_target_r * adapters
    left = 1 - (steps - begin) / (end - begin)
    budget = np.where(steps > end, last, np.where(steps <= begin, first, ((first - last) * left**3 + last).astype(int)))
    chosen = (steps > begin) & (steps < end) & (steps % pet.adalora_delta_t == 0) | (steps == end)
    return first - budget, chosen, steps < end, steps > end
