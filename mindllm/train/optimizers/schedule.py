"""Learning-rate schedules as pure functions of the step, under MindFormers' names.

The formulas are those of Hugging Face ``transformers.optimization`` (constant, linear, cosine, restarts, polynomial) and the
warm-up/stable/decay of MiniCPM (arXiv:2404.06395) with a linear decay.

Two traps of MindFormers are not followed: its polynomial jumps to ``lr_end`` at ``total_steps - warmup_steps``, and its
restarts end at 0 whatever ``lr_end`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mindllm.config.optimizer import (
    ConstantSchedule,
    CosineRestartsSchedule,
    CosineSchedule,
    LinearSchedule,
    LrGroup,
    LrSchedule,
    PolynomialSchedule,
    StableDecaySchedule,
)
from mindllm.errors import UserError

Decay = Callable[
    [float], float
]  # progress after the warm-up, in [0, 1), to the height between lr_end (0) and the peak (1)


def group_learning_rates(
    groups: Sequence[LrSchedule | LrGroup], total_steps: int
) -> Callable[[int], tuple[float, ...]]:
    """Returns the learning rates of groups of weights, in their order, as :func:`learning_rates` does."""
    found = [
        learning_rates(group, total_steps, f"grouped_lr_schedule.grouped.{number}")
        for number, group in enumerate(groups)
    ]
    return lambda step: tuple(rate(step) for rate in found)


def learning_rates(
    schedule: LrSchedule | LrGroup, total_steps: int, key: str = "lr_schedule"
) -> Callable[[int], float]:
    """Returns the learning rate of the update that follows ``step`` updates: the first update of a run has step 0.

    The schedule ends after ``schedule.total_steps``, or ``total_steps`` (those of the run) when that is -1; from there on the
    rate stays at ``lr_end`` (constant: at the peak). The last update of the schedule, ``total_steps - 1``, is one short of it.
    A warm-up that is longer than the schedule goes on. ``key`` is where the schedule stands.

    Raises:
        UserError: the warm-up and the decay of the stable schedule do not fit into the steps.
    """
    length = schedule.total_steps if schedule.total_steps > 0 else total_steps
    warmup = _warmup_steps(schedule, length)
    decay = _decay(schedule, warmup, length, key)
    peak, start = schedule.learning_rate, schedule.warmup_lr_init
    assert peak is not None  # or loading had refused it
    end = peak if isinstance(schedule, ConstantSchedule) else schedule.lr_end

    def rate(step: int) -> float:
        if step < warmup:
            return start + (peak - start) * (step / warmup)
        if step >= length:
            return end
        return end + (peak - end) * decay((step - warmup) / (length - warmup))

    return rate


def _warmup_steps(schedule: LrSchedule | LrGroup, length: int) -> int:
    if schedule.warmup_ratio is not None:
        return _share(schedule.warmup_ratio, length)
    return schedule.warmup_steps or 0


def _share(ratio: float, length: int) -> int:
    return math.floor(ratio * length + 1e-6)  # 0.29 * 100 is 28.999999999999996 in floating point


def _decay(schedule: LrSchedule | LrGroup, warmup: int, length: int, key: str) -> Decay:
    match schedule:
        case ConstantSchedule():
            return lambda progress: 1.0
        case LinearSchedule():
            return lambda progress: 1.0 - progress
        case CosineSchedule():
            return _half_cosine
        case CosineRestartsSchedule(num_cycles=cycles):
            return lambda progress: _half_cosine(cycles * progress % 1.0)
        case PolynomialSchedule(power=power):
            return lambda progress: (1.0 - progress) ** power
        case StableDecaySchedule():
            return _stable_decay(schedule, warmup, length, key)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _stable_decay(schedule: StableDecaySchedule, warmup: int, length: int, key: str) -> Decay:
    decay_steps = _share(schedule.decay_ratio, length)
    stable_steps = length - warmup - decay_steps
    if stable_steps < 0:
        raise UserError(
            f"{key}: a warm-up of {warmup} steps and a decay of {decay_steps} (decay_ratio={schedule.decay_ratio}) "
            f"do not fit into {length} steps; shorten one of them"
        )
    after_warmup = length - warmup
    return lambda progress: min(1.0, (1.0 - progress) * after_warmup / decay_steps) if decay_steps else 1.0
