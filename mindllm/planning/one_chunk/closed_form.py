"""The steps of 1F1B and of GPipe in closed form, and their minimum over all splits of layers.

1F1B: with f and b the times of a stage's forward and backward pass, t = f + b, m micro-batches and, for each stage k,

    w_k = min(stages after k, m - 1)                        forward passes of its warm-up
    P_k = t_0 + ... + t_k
    F_k, B_k = the longest forward, the longest backward pass of the stages 0 to k
    R_k = max(R_(k-1) + t_k, (m - 1 - w_k) t_k)             0 where m - 1 = w_k

the step is the largest, over all stages k <= j, of

    P_j + w_j F_j + R_k + w_k B_k        P_j + w_j B_j + R_k + w_k F_k.

Each is a chain of operations. It goes down to stage j and back, and gains micro-batches on the way until it has passed all m: by
forward passes of a warm-up on one stage, by rounds of a forward and a backward pass on a range of stages that ends with k, every
one of them at least once, and by backward passes of a cool-down. No chain is longer.

Where tensors take time between stages, a round over several stages takes it too, and more than one such round can be longest. The
closed form is then a lower bound, and so are rounds over all stages from one on, as many as there are micro-batches for, and a
last one over as many of these stages as there are micro-batches left: a round over n stages gains n micro-batches.

GPipe: all forward passes, then all backward passes.

Micro-batches are equal, so each of the two is a flow shop of equal jobs: the times of all stages once, and the longest stage once
more for every further micro-batch. The step is A + (m - 1) (max f + max b), A the sum of all forward and backward times.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mindllm.planning.one_chunk.split_program import Extension, SplitProgram


class GPipe(SplitProgram):
    """Values of a partial plan: the sum of its times, the longest backward pass and the longest forward pass."""

    numbers = 3

    def alone(self) -> np.ndarray:
        """Return the time of the stage's passes of all micro-batches but one."""
        return self.more * self.total

    def extend(
        self,
        stage: int,
        values: np.ndarray,
        forward: np.ndarray,
        backward: np.ndarray,
        rest: np.ndarray,
        near: np.ndarray,
    ) -> Extension:
        """Add the times and the longest passes of the stage."""
        sums = np.stack(
            [values[0] + forward + backward, np.maximum(values[1], backward), np.maximum(values[2], forward)]
        )
        return Extension(sums, self.more * (sums[1] + sums[2]), np.zeros(len(rest)))


def warm_up(stages: int, micro_batches: int) -> np.ndarray:
    """Return the forward passes before the first backward pass of each stage, without the one of its pair, ``[stages]``."""
    return np.minimum(stages - 1 - np.arange(stages), micro_batches - 1)


def closed_form(forward: np.ndarray, backward: np.ndarray, micro_batches: int, delay: float = 0.0) -> np.ndarray:
    """Return the step of 1F1B, ``[plans]``, from the times of the stages, ``[stages, plans]``; with a ``delay`` a lower bound."""
    warm = warm_up(len(forward), micro_batches)
    down = rounds = with_forward = with_backward = step = np.zeros(forward.shape[1])
    longest = np.zeros((2, len(down)))
    for stage, (first, second) in enumerate(zip(forward, backward, strict=True)):
        down = down + first + second + (2 * delay if stage else 0.0)
        rounds = rounds_until(stage, warm, micro_batches, first + second, rounds, delay)
        longest = np.maximum(longest, (first, second))
        most = warm[stage] * longest
        with_forward, with_backward = np.maximum((with_forward, with_backward), rounds + most)
        step = np.maximum(step, down + np.maximum(most[0] + with_backward, most[1] + with_forward))
    return step


def rounds_until(
    stage: int, warm: np.ndarray, micro_batches: int, total: np.ndarray, before: np.ndarray, delay: float
) -> np.ndarray:
    """Return R of a stage, from its t in ``total`` and R of the stage ``before``, ``[plans]`` each."""
    rounds = (micro_batches - 1 - int(warm[stage])) * total
    if stage and warm[stage - 1] < micro_batches - 1:
        rounds = np.maximum(rounds, before + total + 2 * delay)
    return rounds


MOST_STAGES = 256  # beyond which the last round is left out


class OneFOneB(SplitProgram):
    """Values of a partial plan: P, R and the longest pass.

    It covers chains that go down to the last stage, whose w is 0, and chains that turn where they began to gain: k = j. Other
    chains are longest only if a stage after the longest passes takes less than one of them (:class:`EveryChain`).
    """

    numbers = 4

    @cached_property
    def warm(self) -> np.ndarray:
        """As :func:`warm_up`."""
        return warm_up(self.stages, self.problem.micro_batches)

    def alone(self) -> np.ndarray:
        """Return the time of rounds on the stage, and of its longer pass in the warm-up or the cool-down."""
        warm = self.warm[:, None, None]
        return (self.more - warm) * self.total + warm * np.maximum(self.forward, self.backward)

    def lookahead(self, stage: int) -> int:
        """Return the number of stages of the last round after a stage: it has the micro-batches that full rounds leave."""
        rest = self.more % (self.stages - stage)
        return max(0, rest - 1) if self.delay and self.stages <= MOST_STAGES else 0

    def extend(
        self,
        stage: int,
        values: np.ndarray,
        forward: np.ndarray,
        backward: np.ndarray,
        rest: np.ndarray,
        near: np.ndarray,
    ) -> Extension:
        """Add a stage to P, R and the longest pass."""
        warm, total = self.warm[stage], forward + backward
        down = values[0] + total
        rounds = rounds_until(stage, self.warm, self.more + 1, total, values[1], self.delay)
        longest = np.maximum(values[2:], (backward, forward))
        beyond = rounds + warm * longest.max(axis=0)
        least = down + 2 * stage * self.delay + warm * longest.min(axis=0) + beyond
        if warm < self.more:  # the rounds may extend to the last stage
            beyond = np.maximum(beyond, rounds + rest)
        later = self.stages - 1 - stage
        most, remaining = divmod(self.more, later + 1)
        if self.delay and most:
            last = remaining * total
            if remaining:
                last = np.maximum(last, total + near + 2 * self.lookahead(stage) * self.delay)
            beyond = np.maximum(beyond, most * (total + rest + 2 * later * self.delay) + last)
        return Extension(np.stack([down, rounds, *longest]), beyond, least)


class EveryChain(OneFOneB):
    """The complete closed form, with two more values: the longest R_k + w_k F_k and R_k + w_k B_k."""

    numbers = 6

    def extend(
        self,
        stage: int,
        values: np.ndarray,
        forward: np.ndarray,
        backward: np.ndarray,
        rest: np.ndarray,
        near: np.ndarray,
    ) -> Extension:
        """Add a stage to all values."""
        extended = super().extend(stage, values[:4], forward, backward, rest, near)
        down, rounds, longest = extended.values[0], extended.values[1], extended.values[2:]
        gained = np.maximum(values[4:], rounds + self.warm[stage] * longest)
        crossed = down + 2 * stage * self.delay + self.warm[stage] * longest + gained[::-1]
        return Extension(
            np.concatenate([extended.values, gained]),
            np.maximum(extended.beyond, gained.max(axis=0)),
            np.maximum(extended.least, crossed.max(axis=0)),
        )
