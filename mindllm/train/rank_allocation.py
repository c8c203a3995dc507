"""AdaLoRA (Zhang et al., 2023): which of the ranks of all adapters are kept, by what they matter to the loss.

An adapter is ``B diag(E) A``. Its rank i is a triplet: an entry of E, a row of A, a column of B. What an entry matters is the
mean over steps of ``|w · dL/dw|`` times the mean of how much that changes (equations 9 to 11); what a triplet matters is the sum
of its entry of E and the means over row and column. The budget, ranks of all adapters together, falls from the first to the
last one (section 3.3), and E of the triplets that matter least is set to zero. Where the paper is open, this does as PEFT does.

What is kept between steps are weights of checkpoints: both means, the ranks that were kept, and the steps taken.

On devices that share the model each has parts of A and B, of the layers of its stage; E is whole on a stage. Products of a matrix
with itself are added over the ranks that have the rest of it, and what triplets matter over all devices at once: so every one
knows the same numbers and removes the same ranks, of one budget for all stages. Whatever is made for each weight goes through
tuples, from which the compiler takes the weights of other stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.config.optimizer_state import IMPORTANCE, KEPT_RANKS, STEPS_TAKEN, UNCERTAINTY, Triplets
from mindllm.config.tuning import PetConfig
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.part_exchange import SumOverDevices, SumOverParts, WholeRows

Cuts = Mapping[str, WeightCut]
"""By the name of a weight."""


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
        places = {item.name: place for place, item in enumerate(weights)}
        self.firsts = tuple(places[group.first] for group in groups)
        self.seconds = tuple(tuple(places[name] for name in group.seconds) for group in groups)
        self.group_of_first = tuple(self.firsts.index(n) if n in self.firsts else -1 for n in range(len(weights)))
        members = {place: number for number, parts in enumerate(self.seconds) for place in parts}
        self.group_of_second = tuple(members.get(n, -1) for n in range(len(weights)))
        self.of_firsts = nn.CellList([FirstPenalty(cuts[group.first], rank) for group in groups])
        self.over_rows = nn.CellList(
            [SumOverParts(cuts[weights[place].name], 0, rank) for parts in self.seconds for place in parts]
        )
        self.number_of = {place: number for number, place in enumerate(members)}
        self.unit = Tensor(np.eye(weights[self.firsts[0]].shape[0], dtype=np.float32))
        self.share = 2.0 * weight / (2 * len(groups))
        self.by_columns, self.product = P.MatMul(transpose_a=True), P.MatMul()

    def construct(self, gradients: tuple[Tensor, ...], unscale: Tensor) -> tuple[Tensor, ...]:
        """``unscale`` turns a gradient into that of the mean loss per token."""
        share = self.share / unscale
        of_seconds: tuple[Tensor, ...] = ()
        for parts in self.seconds:
            overlap = -self.unit
            for place in parts:
                weight = self.weights[place]
                overlap = overlap + self.over_rows[self.number_of[place]](self.by_columns(weight, weight))
            of_seconds = (*of_seconds, overlap * (share / length(overlap)))
        found: tuple[Tensor, ...] = ()
        for place, gradient in enumerate(gradients):
            if self.group_of_first[place] >= 0:
                gradient = gradient + self.of_firsts[self.group_of_first[place]](self.weights[place], share)
            elif self.group_of_second[place] >= 0:
                gradient = gradient + self.product(self.weights[place], of_seconds[self.group_of_second[place]])
            found = (*found, gradient)
        return found


class FirstPenalty(nn.Cell):
    """A ``[rank, in]``, or a part of it, -> ``share · (A Aᵀ - 1) A / |A Aᵀ - 1|`` of that part.

    Of some rows of A it is ``(A' Aᵀ) A - A'``: the unit matrix has no rows that fit whole and cut ones alike.
    """

    def __init__(self, cut: WeightCut, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.is_cut = cut.parts(0) > 1
        self.whole, self.over_columns = WholeRows(cut, rank, gathers=True), SumOverParts(cut, 1, rank)
        self.unit = Tensor(np.eye(cut.shape[0], dtype=np.float32))
        self.by_rows, self.product = P.MatMul(transpose_b=True), P.MatMul()

    def construct(self, weight: Tensor, share: Tensor) -> Tensor:
        whole = self.whole(weight)
        overlap = self.over_columns(self.by_rows(whole, whole)) - self.unit
        share = share / length(overlap)
        if self.is_cut:
            return (self.product(self.over_columns(self.by_rows(weight, whole)), whole) - weight) * share
        return self.product(overlap * share, weight)


def length(matrix: Tensor) -> Tensor:
    """Frobenius's norm."""
    return ops.sqrt(ops.reduce_sum(ops.square(matrix), ()))


class RankAllocation(nn.Cell):
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
        names = [name for group in groups for name in (group.first, group.values, *group.seconds)]
        places = {item.name: place for place, item in enumerate(weights)}
        self.places = tuple(places[name] for name in names)
        self.weights = ParameterTuple([weights[place] for place in self.places])
        self.importance = self.weights.clone(prefix=IMPORTANCE, init="zeros")
        self.uncertainty = self.weights.clone(prefix=UNCERTAINTY, init="zeros")
        self.steps = Parameter(Tensor(0.0, ms.float32), name=STEPS_TAKEN, requires_grad=False)
        place = {name: number for number, name in enumerate(names)}
        self.groups = tuple((place[g.first], place[g.values], tuple(place[name] for name in g.seconds)) for g in groups)
        self.kept = ParameterTuple([weights[places[g.values]] for g in groups]).clone(prefix=KEPT_RANKS, init="ones")
        self.beta1, self.beta2 = pet.adalora_beta1, pet.adalora_beta2
        removed, chosen, counted, fixed = allocation_schedule(pet, len(groups), total_steps)
        self.last = total_steps
        self.removed = Tensor(removed.astype(np.int32))
        self.chosen, self.counted, self.fixed = (Tensor(item.astype(np.float32)) for item in (chosen, counted, fixed))
        self.of_adapters = nn.CellList([TripletScores(group, cuts, rank) for group in groups])
        self.everywhere = ScoresOfAll(len(groups), pet.adalora_init_r, several)
        self.sort, self.gather = P.Sort(), P.Gather()
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, after: Tensor) -> Tensor:
        """``gradients`` of all weights, which times ``coefficient`` moved them; ``after``: what is computed before."""
        step = ops.depend(self.steps, after) + 1.0
        at = ops.cast(ops.minimum(step, float(self.last)), ms.int32)
        counts, chooses, fixed = (self.gather(table, at, 0) for table in (self.counted, self.chosen, self.fixed))
        scores: tuple[Tensor, ...] = ()
        done: tuple[Tensor, ...] = ()
        for number, place in enumerate(self.places):
            weight = ops.depend(self.weights[number], after)
            matters = ops.abs(weight * (gradients[place] * coefficient))
            before, change = self.importance[number], self.uncertainty[number]
            mean = before + counts * (1.0 - self.beta1) * (matters - before)
            spread = change + counts * (1.0 - self.beta2) * (ops.abs(matters - mean) - change)
            scores = (*scores, mean * spread)
            done = (*done, ops.assign(before, mean), ops.assign(change, spread))
        of_adapters: tuple[Tensor, ...] = ()
        for number, (first, values, seconds) in enumerate(self.groups):
            of_seconds: tuple[Tensor, ...] = ()
            for second in seconds:
                of_seconds = (*of_seconds, scores[second])
            of_adapters = (*of_adapters, self.of_adapters[number](scores[first], scores[values], of_seconds))
        of_ranks = self.everywhere(of_adapters)
        removed = self.gather(self.removed, at, 0)
        least = self.gather(self.sort(of_ranks.reshape((-1,)))[0], ops.maximum(removed - 1, 0), 0)
        all_stay = ops.cast(removed == 0, ms.float32)
        stay = ops.maximum(ops.cast(of_ranks > least, ms.float32), all_stay)
        masked = ops.maximum(chooses, fixed)
        for number, (_, values, _) in enumerate(self.groups):
            kept = chooses * stay[number] + (1.0 - chooses) * self.kept[number]
            weight = ops.depend(self.weights[values], after)
            done = (*done, ops.assign(self.weights[values], weight * (masked * kept + (1.0 - masked))))
            done = (*done, ops.assign(self.kept[number], kept))
        return ops.assign(self.steps, ops.depend(step, done))


class TripletScores(nn.Cell):
    """This rank's share of what the triplets of one adapter matter, ``[rank]``, from what entries of its parts of A, E and B
    matter.
    """

    def __init__(self, group: Triplets, cuts: Cuts, rank: int) -> None:
        super().__init__(auto_prefix=False)
        first, seconds = cuts[group.first], [cuts[name] for name in group.seconds]
        self.rows = WholeRows(first, rank, gathers=False)
        self.of_first = 1.0 / (first.copies * first.shape[1])
        self.of_values = 1.0 / cuts[group.values].copies
        rows = sum(second.shape[0] for second in seconds)
        self.of_seconds = tuple(1.0 / (second.copies * rows) for second in seconds)

    def construct(self, first: Tensor, values: Tensor, seconds: tuple[Tensor, ...]) -> Tensor:
        total = self.of_values * values + self.of_first * self.rows(ops.reduce_sum(first, 1))
        for number, second in enumerate(seconds):
            total = total + self.of_seconds[number] * ops.reduce_sum(second, 0)
        return total


class ScoresOfAll(nn.Cell):
    """What the triplets of all adapters matter, ``[adapters, rank]``, from those of each, ``[rank]``: added over all devices
    where ``several`` have shares of them.
    """

    def __init__(self, adapters: int, rank: int, several: bool) -> None:
        super().__init__(auto_prefix=False)
        self.several = several
        self.stack = P.Stack()
        if several:
            self.rows = tuple(Tensor(row.reshape(adapters, 1)) for row in np.eye(adapters, dtype=np.float32))
            self.add = SumOverDevices((adapters, rank))

    def construct(self, of_adapters: tuple[Tensor, ...]) -> Tensor:
        if not self.several:
            return self.stack(of_adapters)
        placed: tuple[Tensor, ...] = ()
        for number, scores in enumerate(of_adapters):
            placed = (*placed, self.rows[number] * scores)
        return self.add(placed)


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
