"""Learning rates equal those of transformers' schedulers, and keep their promises at the joints and at the end."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindllm.config.optimizer import (
    ConstantSchedule,
    CosineRestartsSchedule,
    CosineSchedule,
    LinearSchedule,
    PolynomialSchedule,
    Schedule,
    StableDecaySchedule,
)
from mindllm.errors import UserError
from mindllm.train.optimizers.schedule import learning_rates

PEAK = 3e-4
STEPS = st.integers(1, 300)
KINDS = {
    "ConstantWarmUpLR": ConstantSchedule,
    "LinearWithWarmUpLR": LinearSchedule,
    "CosineWithWarmUpLR": CosineSchedule,
    "CosineWithRestartsAndWarmUpLR": CosineRestartsSchedule,
    "PolynomialWithWarmUpLR": PolynomialSchedule,
    "WarmUpStableDecayLR": StableDecaySchedule,
}
DECAYING = [kind for kind in KINDS if kind != "ConstantWarmUpLR"]


def schedule(kind: str, **fields) -> Schedule:
    return KINDS[kind](type=kind, learning_rate=PEAK, **fields)


def rates(config: Schedule, total_steps: int) -> list[float]:
    rate = learning_rates(config, total_steps)
    return [rate(step) for step in range(total_steps + 3)]


def theirs(scheduler_of: str, total_steps: int, **options) -> list[float]:
    """The rates that a torch scheduler of that name hands to ``total_steps + 3`` updates."""
    # While tests are collected it would import bitsandbytes and compilers of torch.
    from transformers import optimization

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = getattr(optimization, scheduler_of)(optimizer, **options)
    found = []
    for _ in range(total_steps + 3):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


CASES = [
    ("ConstantWarmUpLR", {}, "get_constant_schedule_with_warmup", {}),
    ("LinearWithWarmUpLR", {}, "get_linear_schedule_with_warmup", {}),
    (
        "CosineWithWarmUpLR",
        {"lr_end": 3e-5},
        "get_cosine_with_min_lr_schedule_with_warmup",
        {"min_lr": 3e-5},
    ),
    (
        "CosineWithRestartsAndWarmUpLR",
        {"num_cycles": 3.0},
        "get_cosine_with_hard_restarts_schedule_with_warmup",
        {"num_cycles": 3},
    ),
    (
        "PolynomialWithWarmUpLR",
        {"power": 2.0, "lr_end": 1e-5},
        "get_polynomial_decay_schedule_with_warmup",
        {"power": 2.0, "lr_end": 1e-5},
    ),
    (
        "WarmUpStableDecayLR",
        {"decay_ratio": 0.2},
        "get_wsd_schedule",
        {"num_decay_steps": 20, "decay_type": "linear"},
    ),
]


@pytest.mark.parametrize("warmup", [0, 1, 17])
@pytest.mark.parametrize(("kind", "fields", "scheduler_of", "options"), CASES, ids=[case[0] for case in CASES])
def test_rates_equal_those_of_transformers(kind, fields, scheduler_of, options, warmup):
    options = {"num_warmup_steps": warmup, **options}
    if kind != "ConstantWarmUpLR":
        options["num_training_steps"] = 100
    reached = 101 if kind == "CosineWithWarmUpLR" else 103  # beyond its end theirs rises again, ours stays at lr_end
    ours = rates(schedule(kind, warmup_steps=warmup, **fields), 100)
    assert ours[:reached] == pytest.approx(theirs(scheduler_of, 100, **options)[:reached], rel=1e-12, abs=1e-18)


@given(kind=st.sampled_from(sorted(KINDS)), total=STEPS, ratio=st.floats(0, 0.9), start=st.sampled_from([0.0, 1e-5]))
def test_the_warmup_is_linear_and_ends_at_the_peak(kind, total, ratio, start):
    config = schedule(kind, warmup_ratio=ratio, warmup_lr_init=start)
    warmup = int(ratio * total + 1e-6)
    found = rates(config, total)[: warmup + 1]
    assert found[-1] == pytest.approx(PEAK)
    if warmup:
        assert found[0] == start
        steps = {round((b - a) * 1e12) for a, b in itertools.pairwise(found)}
        assert max(steps) - min(steps) <= 1


@given(kind=st.sampled_from(DECAYING), total=STEPS, warmup=STEPS, end=st.sampled_from([0.0, 1e-5]))
def test_after_the_warmup_rates_fall_to_lr_end_and_stay(kind, total, warmup, end):
    total += warmup
    config = schedule(
        kind, warmup_steps=warmup, lr_end=end, **({"decay_ratio": 0.0} if kind == "WarmUpStableDecayLR" else {})
    )
    found = rates(config, total)
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(found[warmup:]))
    assert all(end * (1 - 1e-12) <= rate <= PEAK * (1 + 1e-12) for rate in found[warmup:])
    assert found[total:] == [end] * 3


@given(
    kind=st.sampled_from(["LinearWithWarmUpLR", "CosineWithWarmUpLR", "PolynomialWithWarmUpLR"]),
    total=st.integers(10, 2000),
)
def test_the_end_is_reached_without_a_jump(kind, total):
    found = rates(schedule(kind, lr_end=1e-5), total)
    assert found[total - 1] - found[total] <= (PEAK - 1e-5) / total * (1 + 1e-9)


def test_constant_stays_at_the_peak():
    assert rates(schedule("ConstantWarmUpLR"), 5) == [PEAK] * 8


def test_restarts_begin_at_the_peak_and_end_at_lr_end():
    found = rates(schedule("CosineWithRestartsAndWarmUpLR", num_cycles=2.0, lr_end=1e-5), 100)
    assert found[0] == found[50] == PEAK
    assert found[49] == pytest.approx(1e-5, rel=0.05)
    assert found[100] == 1e-5


def test_the_stable_phase_is_flat_and_the_decay_linear():
    found = rates(schedule("WarmUpStableDecayLR", warmup_steps=10, decay_ratio=0.2, lr_end=1e-4), 100)
    assert found[10:81] == [PEAK] * 71
    assert found[90] == pytest.approx((PEAK + 1e-4) / 2)
    assert found[100] == 1e-4


def test_total_steps_of_the_schedule_wins_over_those_of_the_run():
    config = schedule("LinearWithWarmUpLR", total_steps=50)
    assert rates(config, 200)[:53] == rates(schedule("LinearWithWarmUpLR"), 50)
    assert learning_rates(config, 200)(199) == 0.0
    assert learning_rates(config, 10)(9) == pytest.approx(PEAK * 41 / 50)


def test_a_ratio_counts_steps_as_people_do():
    assert learning_rates(schedule("ConstantWarmUpLR", warmup_ratio=0.29), 100)(28) < PEAK
    assert learning_rates(schedule("ConstantWarmUpLR", warmup_ratio=0.29), 100)(29) == PEAK


@pytest.mark.parametrize("kind", ["ConstantWarmUpLR", "CosineWithWarmUpLR", "PolynomialWithWarmUpLR"])
def test_a_warmup_longer_than_the_run_rises_to_its_end(kind):
    rates = learning_rates(schedule(kind, warmup_steps=2000), 1000)
    assert [rates(step) for step in (0, 500, 999)] == pytest.approx([0.0, PEAK / 4, PEAK * 999 / 2000])


def test_what_does_not_fit_into_the_steps_is_an_error():
    with pytest.raises(
        UserError, match=r"a warm-up of 95 steps and a decay of 10 \(decay_ratio=0\.1\) do not fit into 100 steps"
    ):
        learning_rates(schedule("WarmUpStableDecayLR", warmup_steps=95), 100)
