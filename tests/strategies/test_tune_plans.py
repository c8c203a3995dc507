"""Strategies whose layers were placed and recomputed by the planner."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindllm.config import load_config
from mindllm.errors import CheckFailed, UserError
from mindllm.strategies import confirm
from mindllm.strategies.candidates import Candidate
from mindllm.strategies.judge import Judged
from mindllm.strategies.outcome import Wanted, compared, find_strategies
from mindllm.strategies.search import evaluate_current, plan_best
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.verdict import usable_memory
from mindllm.units import GIB
from toolkit.benchmark.tune_shipped import SHIPPED

LIMIT = 58 * GIB


def test_scores_that_no_kernel_fuses_are_in_the_plan():
    """Gemma 2 9B: capped scores come back while a layer is computed again, and every rank has the whole embedding."""
    config, device = load_config(SHIPPED / "gemma" / "pretrain_gemma2_9b.yaml"), read_device(DEFAULT)
    candidates = [
        Candidate(1, 8, 1, 1, 1, 128, True, False),
        Candidate(1, 4, 2, 1, 1, 128, True, False),
    ]
    judged = [Judged(one, 0.0, (0.0,)) for one in candidates]
    found = plan_best(config, judged, device, LIMIT, len(judged), 600.0)
    assert {one.candidate for one in found} == set(candidates)
    assert all(max(one.memory) <= usable_memory(LIMIT) for one in found)


def test_a_yaml_that_fits_by_formula_is_held_to_the_dry_run_too(monkeypatch):
    config, device = load_config(SHIPPED / "llama2" / "pretrain_llama2_7b_8p.yaml"), read_device(DEFAULT)
    hand = evaluate_current(config, device)
    assert hand.room(LIMIT).fits
    forecast = [SimpleNamespace(device_peak=60 * GIB), SimpleNamespace(device_peak=40 * GIB)]
    monkeypatch.setattr(confirm, "forecast_stages", lambda run, stages, simulations: forecast)
    found = confirm.simulated(hand)
    assert found.memory == (60.0 * GIB, 40.0 * GIB)
    told = str(compared(found, found, LIMIT)[0])
    assert (
        told
        == "the YAML as it is does not fit: it needs 60.0 GB on stage 0, 2.0 GB more than the limit of 58 GB, in the dry run"
    )


@pytest.mark.parametrize(("missed", "plans"), [(2 * GIB, 1), (12 * GIB, 2), (200 * GIB, 1)])
def test_what_does_not_fit_in_the_dry_run_is_planned_again_with_what_the_formula_missed_left_free(
    missed, plans, monkeypatch
):
    config, device = load_config(SHIPPED / "llama2" / "pretrain_llama2_7b_8p.yaml"), read_device(DEFAULT)
    judged = [Judged(Candidate(4, 1, 2, 1, 1, 32, False, True), 0.0, (0.0,))]
    (planned,) = plan_best(config, judged, device, LIMIT, 1, 600.0)
    simulated = []

    def forecast(run, stages, simulations):
        simulated.append(run)
        return [SimpleNamespace(device_peak=formula + missed) for formula in stage_bytes(workload_of(run))]

    monkeypatch.setattr(confirm, "forecast_stages", forecast)
    told = []
    held = confirm.validate_by_dry_run(
        config, [planned], device, LIMIT, 600.0, lambda what, done=0, total=None: told.append(what)
    )
    said = "\n".join(told)
    assert len(simulated) == plans
    assert ("planned again" in said) == (plans == 2)
    if missed == 200 * GIB:
        assert held == []
        assert "does not fit" in said
    else:
        assert max(held[0].memory) <= LIMIT
        assert (held[0].step.seconds > planned.step.seconds) == (plans == 2)


def test_devices_that_mindspore_does_not_compile_for_are_refused_before_the_search():
    config = load_config(SHIPPED / "llama3" / "pretrain_llama3_8b.yaml")
    with pytest.raises(UserError, match="6 devices: MindSpore compiles for 1, 2, 4 or a multiple of 8"):
        find_strategies(config, read_device(DEFAULT), Wanted(devices=6))


def test_why_the_first_strategy_cannot_be_planned_is_told(monkeypatch):
    config, said = load_config(SHIPPED / "llama3" / "pretrain_llama3_8b.yaml"), "its lists have no YAML form"

    def refuse(*arguments):
        raise UserError(said)

    monkeypatch.setattr("mindllm.strategies.search.plan_candidate", refuse)
    with pytest.raises(CheckFailed, match=f"can be planned; of the first: {said}"):
        find_strategies(config, read_device(DEFAULT), Wanted(devices=4, best=2))
