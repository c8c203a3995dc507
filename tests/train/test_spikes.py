"""The guard against loss spikes: the update of a step past the running range is left out, alike wherever the step runs."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from test_engine import YAML, batch, weights

from mindllm.compiled.execute.engine import LockstepEngine
from mindllm.config import load_config
from mindllm.errors import RunFailed, UserError
from mindllm.train.engine import ReplicaEngine
from mindllm.train.optimizers.spikes import SpikeGuard

GUARD = "--runner_wrapper.skip_spikes={window: 4, deviations: 3, stop_after: 2}"
TINY = load_config(Path(__file__).parents[2] / "configs/llama2/pretrain_llama2_tiny.yaml", [GUARD])
CLUSTER = (
    "--use_parallel=true",
    "--context.device_target=Ascend",
    "--parallel_config.data_parallel=2",
    "--runner_config.batch_size=2",
    "--model.model_config.num_layers=2",
)
ACCUMULATED = ("--runner_config.batch_size=2", "--runner_config.gradient_accumulation_steps=2")
PIPELINE = ("--parallel_config.pipeline_stage=2", "--parallel_config.micro_batch_num=2", "--runner_config.batch_size=1")


def config(*overrides):
    with open("run.yaml", "w", encoding="utf-8") as file:
        file.write(YAML)
    return load_config("run.yaml", [GUARD, *overrides])


def guard(*overrides):
    return SpikeGuard(config(*overrides))


def told(a_guard, values):
    """The limits before each step of these norms, whose losses are the same."""
    found = []
    for value in values:
        found.append(limits := a_guard.limits())
        a_guard.update(value, value, overflow=False, skipped=value > limits[0])
    return found


def test_limits_are_mean_and_deviations_of_the_last_applied_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limits = told(guard(), [1.0, 2.0, 3.0, 100.0, 2.0])
    assert limits[:2] == [(math.inf, math.inf)] * 2  # half a window is not enough
    assert limits[2][0] == pytest.approx(1.5 + 3 * np.std([1, 2], ddof=1))
    assert limits[3] == limits[4] == pytest.approx((2.0 + 3 * 1.0,) * 2)  # 100 was skipped, and is no part of the range


@given(some.lists(some.floats(0.125, 1e6, width=32), min_size=1, max_size=30), some.integers(0, 30))
def test_a_guard_that_was_saved_has_the_limits_of_one_that_was_not(norms, at):
    whole, first, second = (SpikeGuard(TINY) for _ in range(3))
    expected = told(whole, norms)
    told(first, norms[:at])
    second.load(first.state())
    assert told(second, norms[at:]) == expected[at:]


def test_values_that_are_not_finite_are_no_part_of_the_range(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_guard = guard()
    told(a_guard, [1.0, 2.0])
    limits = a_guard.limits()
    for value in (math.nan, math.inf):
        a_guard.update(value, value, overflow=False, skipped=False)
    assert a_guard.limits() == limits


def test_nothing_is_watched_where_no_guard_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert SpikeGuard(config("--runner_wrapper.skip_spikes=null")).limits() == ()


def test_as_many_spikes_in_a_row_as_are_borne_end_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_guard = guard()
    told(a_guard, [1.0, 1.1, 1.2, 1.1])
    for _ in range(2):
        a_guard.check_consecutive(5)
        a_guard.update(1.0, 50.0, overflow=False, skipped=True)
    with pytest.raises(
        RunFailed, match=r"step 6: 2 steps in a row were skipped as spikes .*weights are those of step 4"
    ):
        a_guard.check_consecutive(6)


@pytest.mark.parametrize(("overflow", "in_a_row"), [(True, 2), (False, 1)])
def test_an_overflow_between_two_spikes_does_not_part_them(tmp_path, monkeypatch, overflow, in_a_row):
    monkeypatch.chdir(tmp_path)
    a_guard = guard()
    told(a_guard, [1.0, 1.1, 1.2, 1.1])
    for spike in (True, False, True):
        a_guard.update(1.0, 50.0 if spike else 1.0, overflow=overflow and not spike, skipped=spike)
    assert a_guard.in_a_row == in_a_row


def test_a_pipeline_cannot_watch_the_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"skip_spikes.watch.*write \[norm\]"):
        config(*CLUSTER, *PIPELINE, "--runner_wrapper.skip_spikes.watch=[loss]")


@pytest.mark.parametrize("options", [(), pytest.param(ACCUMULATED, marks=pytest.mark.slow)])
def test_a_step_past_a_limit_changes_nothing_and_says_so(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    guarded, plain = (
        ReplicaEngine(config(*options)),
        ReplicaEngine(config(*options, "--runner_wrapper.skip_spikes=null")),
    )
    before = weights(guarded)
    for limits in ((0.1, math.inf), (math.inf, 0.1)):
        result = guarded.step(batch(), 1e-2, 1.0, limits)
        assert (result.skipped, result.overflow) == (True, False)
        assert all(np.array_equal(weights(guarded)[name], before[name]) for name in before)
    exact = (result.global_norm, result.loss)
    results = guarded.step(batch(), 1e-2, 1.0, exact), plain.step(batch(), 1e-2, 1.0)
    assert not results[0].skipped
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    for name, weight in weights(plain).items():
        np.testing.assert_allclose(weights(guarded)[name], weight, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("options", [pytest.param(CLUSTER, marks=pytest.mark.slow), CLUSTER + PIPELINE])
def test_all_ranks_skip_the_step_that_one_device_skips(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    alone = ReplicaEngine(config("--model.model_config.num_layers=2"))
    cluster = LockstepEngine(config(*options), cache=tmp_path)
    names = SpikeGuard(config(*options)).names
    for seed, norm_limit in ((0, math.inf), (1, 0.1), (2, math.inf)):
        limits = (norm_limit, math.inf)
        one, all_of_them = (
            alone.step(batch(seed), 1e-2, 1.0, limits),
            cluster.step(batch(seed), 1e-2, 1.0, limits[: len(names)]),
        )
        assert one.skipped == all_of_them.skipped == (norm_limit == 0.1)
        assert all_of_them.loss == pytest.approx(one.loss, rel=1e-5)
