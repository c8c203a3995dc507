"""A YAML of MindFormers, as it is and converted, through the tools that prove a run: it is the same run for all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dry_run_cases import FormulaSimulations

from mindllm.cli import dry_run
from mindllm.cli.convert import main as convert
from mindllm.config import load_config
from mindllm.dry_run import simulations
from mindllm.parallel.layer_plan import make_plan
from tests.mindformers.mindformers_files import LEGACY, writer

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "vocab_size": 128,
    "seq_length": 64,
    "multiple_of": 32,
}
SIZES = {
    "data_parallel": 2,
    "model_parallel": 2,
    "pipeline_stage": 2,
    "micro_batch_num": 4,
    "use_seq_parallel": True,
    "vocab_emb_dp": False,
}
STAGES = {f"parallel_config.{key}": value for key, value in SIZES.items()}
TINY = {f"model.model_config.{key}": value for key, value in SMALL.items()} | STAGES
RECOMPUTE = {
    "recompute_config.recompute": [1, 0],
    "recompute_config.select_recompute": {r"feed_forward\.mul": [2, 1]},
}
TOOLS = {  # what stands before and after the run
    "inspect": (["comm"], ["--rank", "0"]),
    "dry-run": ([], ["--json"]),
    "check": ([], []),
}


def both(directory, changes):
    """The paths of a file of MindFormers and of what it is converted to."""
    theirs, ours = writer(directory)(LEGACY, changes), directory / "ours.yaml"
    assert convert([str(theirs), "-o", str(ours)]) == 0
    return theirs, ours


def test_the_dry_run_of_theirs_is_that_of_ours(tmp_path, monkeypatch, capsys):
    theirs, ours = both(tmp_path, STAGES | RECOMPUTE)
    asked = FormulaSimulations()
    asked.source_lines = lambda config: {}
    monkeypatch.setattr(simulations, "simulations_here", lambda *_, **__: asked)
    capsys.readouterr()
    told = []
    for path in (theirs, ours):
        assert dry_run.main(["--config", str(path), "--json", "--output", str(tmp_path / "out")]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert len(told[0]["stages"]) == SIZES["pipeline_stage"]
    assert make_plan(load_config(ours)) == make_plan(load_config(theirs))
    assert [layer.recompute for layer in make_plan(load_config(ours)).layers].count(True) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_tools_take_theirs_as_it_is(name, tmp_path):
    """In processes of their own, MindSpore's compiler and dry run included."""
    theirs, ours = both(tmp_path, TINY)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    before, after = TOOLS[name]
    told = []
    for path in (theirs, ours):
        command = [sys.executable, "-m", "mindllm.main", name, *before, "--config", str(path), *after]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told.append(done.stdout)
    if name == "dry-run":
        assert json.loads(told[0]) == json.loads(told[1])
        assert all(stage["used_peak_mb"] > 0 for stage in json.loads(told[0])["stages"])
    elif name == "check":
        assert all("all ranks match a single device" in text for text in told)
    else:
        assert told[0] == told[1]
