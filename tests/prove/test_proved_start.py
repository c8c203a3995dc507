"""What a run makes of its proof: the line, ``require_proof``, and measured steps held against what was predicted."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from run_fixtures import MINIMAL

from mindllm.config import load_config, override_config
from mindllm.errors import CheckFailed
from mindllm.prove import found
from mindllm.prove.answers import Standing
from mindllm.prove.found import hash_of, remember, versions_here
from mindllm.prove.questions import DATA, MEMORY, STEP_TIME
from mindllm.run import proof_monitor
from mindllm.run.outcome import train_in_child
from mindllm.run.proof import Prediction, summarize_proof
from mindllm.run.proof_monitor import COLUMN, ProofMonitor
from mindllm.units import GIB
from tests.prove.made_proofs import figures, proof


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "run.yaml").write_text(f"require_proof: true\n{yaml.safe_dump(MINIMAL)}")
    return load_config(tmp_path / "run.yaml")


def proved(config, *changed, target="CPU", error=0.13, versions=None, **options):
    """Keep a proof of a configuration, predicted for devices of a kind."""
    known = figures()
    known[STEP_TIME] |= {"device_target": target, "step_error": error}
    made = proof(*changed, known=known, config_hash=hash_of(config), **options)
    remember(replace(made, run=replace(made.run, versions=versions or versions_here())))


def test_a_run_that_requires_a_proof_has_none(config, tmp_path):
    with pytest.raises(CheckFailed) as refused:
        summarize_proof(config)
    assert refused.value.exit_code == 3
    assert str(refused.value) == (
        f"{tmp_path}/run.yaml:1: require_proof: not proved (value true); run mindllm prove {tmp_path}/run.yaml, or write false"
    )
    with pytest.raises(CheckFailed, match="require_proof: not proved"):
        train_in_child(config)
    assert summarize_proof(override_config(config, {"require_proof": False})).line.startswith(
        "not proved; mindllm prove "
    )


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({}, {"complete": False}, "not proved"),
        ({MEMORY: Standing.REFUTED}, {}, "refuted 2026-11-20: memory"),
        ({DATA: Standing.NOT_PROVED}, {}, "not proved 2026-11-20: data"),
        ({}, {"versions": {**versions_here(), "mindspore": "2.9.0"}}, "by other software (mindspore 2.9.0, here "),
    ],
)
def test_a_proof_that_is_not_ready_is_not_enough(config, changed, options, said):
    proved(config, changed, **options)
    with pytest.raises(CheckFailed) as refused:
        summarize_proof(config)
    assert said in str(refused.value)
    assert "run mindllm prove " in str(refused.value)


def test_a_run_with_a_proof_says_so_and_knows_what_it_predicts(config):
    proved(config, {DATA: Standing.NOT_PROVED}, allowed=(DATA,))
    at_start = summarize_proof(config)
    assert at_start.line == "proved 2026-11-20: fits 41.4 of 58 GB, 30.4 s a step expected, without a proof of data"
    assert at_start.prediction == Prediction(30.4, 0.13, 41.4 * GIB)


def test_a_prediction_of_other_devices_is_not_held_against_these(config):
    proved(config, target="Ascend")
    assert summarize_proof(config).prediction is None
    proved(override_config(config, {"context.device_target": "Ascend"}), target="Ascend", error=None)
    assert summarize_proof(override_config(config, {"context.device_target": "Ascend"})).prediction == Prediction(
        30.4, None, 41.4 * GIB
    )


@pytest.mark.parametrize("wrong", ["NaN", -1.0, 0, None, {}])
def test_figures_that_are_none_predict_nothing(config, wrong):
    made = proof(known=figures(step=wrong), config_hash=hash_of(config), complete=True)
    remember(replace(made, run=replace(made.run, versions=versions_here())))
    assert summarize_proof(override_config(config, {"require_proof": False})).prediction is None


def test_whatever_is_wrong_a_run_begins(config, monkeypatch):
    def fail(config):
        raise RuntimeError("no home")

    monkeypatch.setattr(found, "find_proof", fail)
    assert (
        summarize_proof(override_config(config, {"require_proof": False})).line
        == "not proved; its proof cannot be read"
    )
    with pytest.raises(CheckFailed, match="its proof cannot be read"):
        summarize_proof(config)


def test_looking_for_a_proof_imports_nothing_heavy():
    code = "import sys, mindllm.run.start, mindllm.prove.found; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"mindspore", "scipy", "highspy", "mindllm.verify", "mindllm.planning"} & set(done.stdout.split())


def watched(config, monitor, *seconds):
    """Let a monitor see steps; return what metrics have of each."""
    state = SimpleNamespace(config=config, against_proof={})
    columns = []
    for step, taken in enumerate(seconds, start=1):
        monitor.step_end(state, SimpleNamespace(step=step, step_time_s=taken))
        columns.append(state.against_proof.get(COLUMN))
    return columns


def test_steps_within_the_range_are_told_once(config, caplog):
    caplog.set_level(logging.INFO)
    columns = watched(config, ProofMonitor(Prediction(2.0, 0.1)), 60.0, *[2.1] * 29)
    assert columns == [None, *[1.05] * 29]
    assert [record.getMessage() for record in caplog.records] == ["step time 2.100 s; proved 2.000 s ± 10% (+5.0%)"]


@pytest.mark.parametrize(("taken", "said"), [(2.3, "15.0% more"), (1.6, "20.0% less")])
def test_steps_past_the_range_are_warned_of_once(config, caplog, taken, said):
    watched(config, ProofMonitor(Prediction(2.0, 0.1)), 60.0, *[taken] * 29)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"steps up to 10 take {taken:.3f} s, {said} than proved and outside ±10%; " in warning


def test_steps_that_become_slow_are_warned_of_when_they_do(config, caplog):
    watched(config, ProofMonitor(Prediction(2.0, 0.1)), 60.0, *[2.0] * 9, *[3.0] * 10, *[2.0] * 10, *[3.0] * 10)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(" take")[0] for text in warnings] == ["steps up to 20", "steps up to 40"]


def test_a_range_that_is_not_known_is_never_left(config, caplog):
    caplog.set_level(logging.INFO)
    watched(config, ProofMonitor(Prediction(2.0)), 60.0, *[9.0] * 19)
    assert [record.getMessage() for record in caplog.records] == ["step time 9.000 s; proved 2.000 s (+350.0%)"]


@pytest.mark.parametrize(("peak", "warned"), [(40.0, False), (41.5, False), (43.0, True)])
def test_memory_of_a_device_is_held_against_the_dry_run(config, caplog, monkeypatch, peak, warned):
    """The device is a stand-in: none was at hand."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(proof_monitor, "peak_memory", lambda config: int(peak * GIB))
    watched(config, ProofMonitor(Prediction(2.0, 0.1, 41.4 * GIB)), 60.0, *[2.0] * 9)
    said = [record.getMessage() for record in caplog.records]
    assert said[1] == f"peak memory of this rank {peak:.1f} GB; proved 41.4 GB"
    assert ("peak memory is 1.6 GB above the proof" in said) is warned
