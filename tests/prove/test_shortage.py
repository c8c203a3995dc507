"""A stage that does not fit is refuted with what closes the shortage, or with what was tried."""

from __future__ import annotations

from dry_run_cases import FormulaSimulations, pipeline

from mindllm.config import override_config
from mindllm.dry_run.run import advise, simulate
from mindllm.prove.answers import Standing
from mindllm.prove.checks import stages
from mindllm.units import GIB


def answered(limit):
    config = override_config(pipeline(2, 8, 8), {"context.max_device_memory": limit})
    simulations = FormulaSimulations()
    found = simulate(config, simulations)
    return stages.judged(found, "" if found.fits else advise(found, simulations))


def test_what_closes_a_shortage_is_the_advice():
    fullest = answered("58GB").figures["peak"]
    answer = answered(f"{fullest / GIB - 0.1:.3f}GB")
    assert answer.standing is Standing.REFUTED
    (finding, *_) = answer.findings
    assert finding.key == "context.max_device_memory"
    assert "GB more than the limit" in finding.message
    assert "recompute" in finding.advice


def test_where_nothing_closes_it_what_was_tried_is_said():
    tried = "no single change closes it: full recompute leaves it 0.003 GB short; use more devices"
    advice = f"stage 0 (rank 0) needs 0.009 GB\n{tried}"
    assert stages._ways(advice) == tried
