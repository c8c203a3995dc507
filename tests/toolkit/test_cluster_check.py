"""The command line of the cluster check: the answer, its exit codes, its JSON, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.config import render_config
from mindllm.errors import UserError
from toolkit.cluster_check import __main__ as command
from toolkit.cluster_check import check as subject

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, **run) -> Path:
    path.write_text(render_config(cluster_run(**run)), encoding="utf-8")
    return path


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "toolkit.cluster_check", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=500, check=False)


def test_a_good_configuration_from_the_command_line(tmp_path, graph_cache):
    """fp16 as the YAML says, grouped queries, two ranks; what it printed is read as a program would."""
    path = write(tmp_path / "run.yaml", tp=2)
    table = tmp_path / "proven.md"
    done = start("--config", path, "--real_dtype", "--json", "--cache", graph_cache, "--table", table)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["ranks"] == 2
    assert found["dtype"] == "float16"
    assert len(found["losses"]) == len(found["single_device_losses"]) == 2
    assert found["losses"] == pytest.approx(found["single_device_losses"], rel=5e-4)
    assert 0 < found["max_parameter_error"] < 5e-3
    assert found["overflow_skipped"] is True
    assert "| 2 | tp2 |" in table.read_text()


def test_a_vocabulary_that_does_not_divide_is_refused_before_anything_is_compiled(tmp_path):
    path = write(tmp_path / "run.yaml", tp=2)
    done = start("--config", path, "--model.model_config.vocab_size=129")
    assert done.returncode == 2
    assert "vocab_size: is not divisible by parallel_config.model_parallel 2 (value 129)" in " ".join(
        done.stderr.split()
    )
    assert "Traceback" not in done.stderr


def test_one_device_and_no_steps_are_refused(tmp_path):
    path = write(tmp_path / "run.yaml", use_parallel=False)
    with pytest.raises(UserError, match="describes one device; there is nothing to compare it with"):
        command.main(["--config", str(path)])
    with pytest.raises(UserError, match="--steps must be at least 1"):
        command.main(["--config", str(path), "--steps", "0"])


def test_a_difference_ends_with_3(tmp_path, monkeypatch, capsys):
    config = cluster_run(tp=2)
    seconds = {"compile": 1.0, "execute": 1.0, "total": 2.0}
    good = subject.Outcome(config, (), (), 2, seconds=seconds)
    bad = replace(
        good, problems=("step 1: loss: 4.6 on a single device, 5.1 on the cluster",), first_difference="MatMul"
    )
    path = str(write(tmp_path / "run.yaml", tp=2))
    for outcome, code in ((good, 0), (bad, 3)):
        monkeypatch.setattr(subject, "check", lambda *_, outcome=outcome: outcome)
        assert command.main(["--config", path, "--no_cache"]) == code
    printed = capsys.readouterr().out
    assert "step 1: loss: 4.6 on a single device, 5.1 on the cluster" in printed
    assert "where it begins: MatMul" in printed
