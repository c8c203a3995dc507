"""A run and its proof through the command line: the line it begins with, what it measures beside it, and ``require_proof``."""

import json

from command_line import STEPS, read_lines, run

from mindllm.config import load_config
from mindllm.prove.answers import Answer, Standing
from mindllm.prove.found import hash_of, versions_here
from mindllm.prove.proof import Proof, Run
from mindllm.prove.questions import QUESTIONS, STEP_TIME


def test_a_run_that_requires_a_proof_begins_with_one(config_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    required = ("--require_proof", "--do_eval=false")
    refused = run(config_file, tmp_path / "out", *required, expect=3)
    assert "require_proof: not proved (value true); run mindllm prove" in refused
    assert "--do_eval=false" in refused
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    config = load_config(config_file, ["--do_eval=false"])
    figures = {"seconds": 1e-6, "step_error": 0.13, "device_target": "CPU"}
    answers = tuple(
        Answer(name, Standing.PROVED, "made by hand", figures=figures if name == STEP_TIME else {})
        for name in QUESTIONS
    )
    made = Proof(Run("run", hash_of(config), {}, versions_here(), 42, "2026-11-20T14:03:05+00:00"), answers)
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "proof.json").write_text(json.dumps(made.to_dict()))
    printed = run(config_file, tmp_path / "out", *required)
    assert "proved 2026-11-20: 1e-06 s a step expected" in printed
    assert " s; proved 0.000 s ± 13% (+" in printed
    assert "% more than proved and outside ±13%; check for a slow rank" in printed
    columns = ["step_time_to_predicted" in record for record in read_lines(tmp_path / "out" / "metrics.jsonl")]
    assert columns == [False, *[True] * (STEPS - 1)]


def test_a_run_without_a_proof_says_so_and_is_as_before(config_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    printed = run(config_file, tmp_path / "out", "--do_eval=false", "--runner_config.stop_step=2")
    assert f"not proved; mindllm prove {config_file} " in printed
    assert all("step_time_to_predicted" not in record for record in read_lines(tmp_path / "out" / "metrics.jsonl"))
