"""AdaLoRA (Zhang et al., 2023): which of the ranks of all adapters are kept, by what they matter to the loss.

An adapter is ``B diag(E) A``. Its rank i is a triplet: an entry of E, a row of A, a column of B. What an entry matters is the
mean over steps of ``|w · dL/dw|`` times the mean of how much that changes (equations 9 to 11); what a triplet matters is the sum
of its entry of E and the means over row and column. The budget, ranks of all adapters together, falls from the first to the
last one (section 3.3), and E of the triplets that matter least is set to zero. Where the paper is open, this does as PEFT does.

What is kept between steps are weights of checkpoints: both means, the ranks that were kept, and the steps taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.config.optimizer_state import IMPORTANCE, KEPT_RANKS, STEPS_TAKEN, UNCERTAINTY, Triplets
from mindllm.config.tuning import PetConfig

add_penalty = ops.MultitypeFuncGraph("add_penalty")


class OrthogonalPenalty(nn.Cell):
    """Adds to gradients those of ``weight · mean(|A Aᵀ - 1|, |Bᵀ B - 1|)`` (equation 4; norms are Frobenius's).

    The gradient of ``|A Aᵀ - 1|`` is ``2 (A Aᵀ - 1) A / |A Aᵀ - 1|``; B may be in parts of its rows.
    """

    def __init__(self, weights: Sequence[Parameter], groups: Sequence[Triplets], weight: float) -> None:
        super().__init__(auto_prefix=False)
        self.weights = ParameterTuple(weights)
        places = {item.name: place for place, item in enumerate(weights)}
        self.firsts = tuple(places[group.first] for group in groups)
        self.seconds = tuple(tuple(places[name] for name in group.seconds) for group in groups)
        self.group_of_first = tuple(self.firsts.index(n) if n in self.firsts else -1 for n in range(len(weights)))
        members = {place: number for number, parts in enumerate(self.seconds) for place in parts}
        self.group_of_second = tuple(members.get(n, -1) for n in range(len(weights)))
        rank = weights[self.firsts[0]].shape[0]
        self.unit = Tensor(np.eye(rank, dtype=np.float32))
        self.share = 2.0 * weight / (2 * len(groups))
        self.by_rows, self.by_columns, self.product = P.MatMul(transpose_b=True), P.MatMul(transpose_a=True), P.MatMul()

    def construct(self, gradients: tuple[Tensor, ...], unscale: Tensor) -> tuple[Tensor, ...]:
        """``unscale`` turns a gradient into that of the mean loss per token."""
        of_seconds: tuple[Tensor, ...] = ()
        for parts in self.seconds:
            overlap = -self.unit
            for place in parts:
                overlap = overlap + self.by_columns(self.weights[place], self.weights[place])
            of_seconds = (*of_seconds, self.scaled(overlap, unscale))
        found: tuple[Tensor, ...] = ()
        for place, gradient in enumerate(gradients):
            if self.group_of_first[place] >= 0:
                weight = self.weights[place]
                overlap = self.scaled(self.by_rows(weight, weight) - self.unit, unscale)
                gradient = gradient + self.product(overlap, weight)
            elif self.group_of_second[place] >= 0:
                gradient = gradient + self.product(self.weights[place], of_seconds[self.group_of_second[place]])
            found = (*found, gradient)
        return found

    def scaled(self, overlap: Tensor, unscale: Tensor) -> Tensor:
        """``share · C / |C|``, in the scale of the gradients."""
        return overlap * (self.share / (unscale * ops.sqrt(ops.reduce_sum(ops.square(overlap), ()))))


class RankAllocation(nn.Cell):
    """Ends a step: weights as they are after the update, and the gradients they were updated with.

    Args:
        weights: all that the optimizer updates.
        total_steps: of the run.
    """

    def __init__(
        self, weights: Sequence[Parameter], groups: Sequence[Triplets], pet: PetConfig, total_steps: int
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
        self.kept = ParameterTuple(
            [
                Parameter(initializer("ones", (pet.adalora_init_r,), ms.float32), f"{KEPT_RANKS}.{group.values}", False)
                for group in groups
            ]
        )
        self.rank, self.beta1, self.beta2 = pet.adalora_init_r, pet.adalora_beta1, pet.adalora_beta2
        removed, chosen, counted, fixed = allocation_schedule(pet, len(groups), total_steps)
        self.last = total_steps
        self.removed = Tensor(removed.astype(np.int32))
        self.chosen, self.counted, self.fixed = (Tensor(item.astype(np.float32)) for item in (chosen, counted, fixed))
        self.sort, self.gather = P.Sort(), P.Gather()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, after: Tensor) -> Tensor:
        """``gradients`` of all weights, which times ``coefficient`` moved them; ``after``: what is computed before."""
        step = ops.depend(self.steps, after) + 1.0
        at = ops.cast(ops.minimum(step, float(self.last)), ms.int32)
        counts, chooses, fixed = (self.gather(table, at, 0) for table in (self.counted, self.chosen, self.fixed))
        scores: tuple[Tensor, ...] = ()
        means: tuple[tuple[Tensor, Tensor], ...] = ()
        for number, place in enumerate(self.places):
            weight = ops.depend(self.weights[number], after)
            matters = ops.abs(weight * (gradients[place] * coefficient))
            before, change = self.importance[number], self.uncertainty[number]
            mean = before + counts * (1.0 - self.beta1) * (matters - before)
            spread = change + counts * (1.0 - self.beta2) * (ops.abs(matters - mean) - change)
            scores = (*scores, mean * spread)
            means = (*means, (mean, spread))
        of_ranks = self.of_ranks(scores)
        everywhere = ops.concat(of_ranks, 0)
        removed = self.gather(self.removed, at, 0)
        least = self.gather(self.sort(everywhere)[0], ops.maximum(removed - 1, 0), 0)
        all_stay = ops.cast(removed == 0, ms.float32)
        done = step
        for number, (mean, spread) in enumerate(means):
            done = ops.depend(done, ops.assign(self.importance[number], mean))
            done = ops.depend(done, ops.assign(self.uncertainty[number], spread))
        for number, (_, values, _) in enumerate(self.groups):
            stays = ops.maximum(ops.cast(of_ranks[number] > least, ms.float32), all_stay)
            kept = chooses * stays + (1.0 - chooses) * self.kept[number]
            masked = ops.maximum(chooses, fixed)
            weight = ops.depend(self.weights[values], done)
            done = ops.depend(done, ops.assign(self.weights[values], weight * (masked * kept + (1.0 - masked))))
            done = ops.depend(done, ops.assign(self.kept[number], kept))
        return ops.assign(self.steps, ops.depend(step, done))

    def of_ranks(self, scores: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the triplets of each adapter matter, ``[rank]``."""
        found: tuple[Tensor, ...] = ()
        for first, values, seconds in self.groups:
            total, rows = ops.zeros_like(scores[values]), 0
            for second in seconds:
                total = total + ops.reduce_sum(scores[second], 0)
                rows += scores[second].shape[0]
            found = (*found, scores[values] + ops.reduce_mean(scores[first], 1) + total / float(rows))
        return found


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
