"""The step of 1F1B in closed form, and the least of it over all splits of layers.

With f and b the times of a stage's forward and backward pass, t = f + b, m micro-batches and, for each stage k,

    w_k = min(stages behind k, m - 1)                       forward passes of its warm-up
    P_k = t_0 + ... + t_k
    F_k, B_k = the longest forward, the longest backward pass of the stages 0 to k
    R_k = max(R_(k-1) + t_k, (m - 1 - w_k) t_k)             0 where m - 1 = w_k

the step is the largest, over all stages k <= j, of

    P_j + w_j F_j + R_k + w_k B_k        P_j + w_j B_j + R_k + w_k F_k.

Each is a chain of operations. It goes down to stage j and back, and gains micro-batches on the way until it has passed all m: by
forward passes of a warm-up on one stage, by rounds of a forward and a backward pass on a range of stages that ends with k, every
one of them at least once, and by backward passes of a cool-down. No chain is longer. Where tensors take time between stages, a
round over several stages takes it too, and many such rounds can be longest: those over all stages up to k are considered, so that
the closed form is then a lower bound.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from toolkit.pipeline_balance.split_program import Ahead, SplitProgram


def warm_up(stages: int, micro_batches: int) -> np.ndarray:
    """Forward passes before the first backward pass of each stage, beside the one it belongs to, ``[stages]``."""
    return np.minimum(stages - 1 - np.arange(stages), micro_batches - 1)


def closed_form(forward: np.ndarray, backward: np.ndarray, micro_batches: int, delay: float = 0.0) -> np.ndarray:
    """Step of 1F1B, ``[plans]``, from the times of the stages, ``[stages, plans]``; with a ``delay`` a lower bound."""
    stages = len(forward)
    total, warm = forward + backward, warm_up(stages, micro_batches)
    down = np.zeros(total.shape[1])
    rounds = widest_backward = widest_forward = step = down
    longest = np.zeros((2, *down.shape))
    for stage in range(stages):
        down = down + total[stage] + (2 * delay if stage else 0.0)
        rounds = rounds_of(stage, warm, micro_batches, total[stage], rounds, down, delay)
        longest = np.maximum(longest, (forward[stage], backward[stage]))
        first, second = warm[stage] * longest
        widest_backward = np.maximum(widest_backward, rounds + second)
        widest_forward = np.maximum(widest_forward, rounds + first)
        step = np.maximum(step, down + np.maximum(first + widest_backward, second + widest_forward))
    return step


def rounds_of(
    stage: int,
    warm: np.ndarray,
    micro_batches: int,
    total: np.ndarray,
    before: np.ndarray,
    down: np.ndarray,
    delay: float,
) -> np.ndarray:
    """R of a stage; ``total``: its t, ``before``: R of the stage before, ``down``: P with delays, all ``[plans]``."""
    left = micro_batches - 1 - int(warm[stage])
    if left == 0:
        return np.zeros(total.shape)
    rounds = left * total
    if stage and warm[stage - 1] < micro_batches - 1:
        rounds = np.maximum(rounds, before + total + 2 * delay)
    most = left // (stage + 1)
    if delay and most:
        rounds = np.maximum(rounds, most * down + (left - most * (stage + 1)) * total)
    return rounds


class OneFOneB(SplitProgram):
    """Numbers of a partial plan: P, R and the longest pass. Of two longest passes the longer is taken for both."""

    @cached_property
    def warm(self) -> np.ndarray:
        """As :func:`warm_up`."""
        return warm_up(self.stages, self.problem.micro_batches)

    def alone(self) -> np.ndarray:
        """Rounds on the stage and its longer pass in the warm-up or the cool-down."""
        warm = self.warm[:, None, None]
        return (self.more - warm) * self.total + warm * np.maximum(self.forward, self.backward)

    def extend(
        self, stage: int, values: np.ndarray, forward: np.ndarray, backward: np.ndarray, rest: np.ndarray
    ) -> Ahead:
        """Adds P, R and the longest pass of the stage."""
        warm, total = self.warm[stage], forward + backward
        down = values[0] + total
        delays = 2 * stage * self.delay
        rounds = rounds_of(stage, self.warm, self.more + 1, total, values[1], down + delays, self.delay)
        longest = np.maximum(values[2], np.maximum(forward, backward))
        beyond = rounds + warm * longest
        least = down + delays + warm * np.minimum(forward, backward) + beyond
        if warm < self.more:  # the rounds may go on to the last stage
            beyond = np.maximum(beyond, rounds + rest)
        behind = self.stages - 1 - stage
        most = self.more // (behind + 1)
        if self.delay and most:  # rounds over this stage and all behind it
            round_trip = total + rest + 2 * behind * self.delay
            beyond = np.maximum(beyond, most * round_trip + (self.more - most * (behind + 1)) * total)
        return Ahead(np.stack([down, rounds, longest]), beyond, least)
