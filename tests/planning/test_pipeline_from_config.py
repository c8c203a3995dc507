"""The planner from a run YAML, through its command line: simulated, planned, confirmed by a dry run, written, read back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.cli import plan as tool
from mindllm.command import run_command
from mindllm.config import load_config, render_config
from mindllm.errors import CheckFailed
from mindllm.parallel.layer_plan import make_plan
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.prediction import predict

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"num_layers": 6, "seq_length": 512, "hidden_size": 128, "intermediate_size": 512, "n_kv_heads": 4}
LIMIT = "130MB"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run of two stages."""
    directory = tmp_path_factory.mktemp("planned")
    for name, stages in (("run", 2), ("alone", 1)):
        micro = 4 if stages > 1 else 1
        config = cluster_run(pp=stages, micro=micro, model=MODEL, runner_config={"batch_size": 4})
        (directory / f"{name}.yaml").write_text(render_config(config), encoding="utf-8")
    return directory


def run(directory, *options, expect=0):
    """Runs the command line; returns what it printed."""
    command = [sys.executable, "-m", "toolkit.pipeline_balance", *options]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if expect == 0 else done.stderr


@pytest.fixture(scope="module")
def planned(place):
    """The answer for a run that does not fit without recomputation."""
    options = ("--max_memory", LIMIT, "--apply", "--output", "planned.yaml", "--seconds", "1")
    return json.loads(run(place, "--config", "run.yaml", "--json", *options))


@pytest.mark.slow
def test_a_plan_is_confirmed_by_the_dry_run(planned):
    limit = float(LIMIT.removesuffix("MB"))
    assert max(planned["dry_run_with_gaps_mb"]) <= limit
    assert planned["peak_memory_mb"] == pytest.approx(planned["dry_run_mb"], rel=0.01)
    assert planned["objective"] >= planned["lower_bound"] > 0
    assert max(planned["dry_run_needed_mb"]) <= limit


@pytest.mark.slow
def test_what_is_written_is_a_whole_run_with_the_plan(planned, place):
    written = load_config(place / "planned.yaml")
    layers = make_plan(written).layers
    assert [layer.stage for layer in layers] == [layer["stage"] for layer in planned["layers"]]
    assert [layer.recompute for layer in layers] == [layer["recompute"] == "full" for layer in planned["layers"]]
    assert written.model.config.hidden_size == MODEL["hidden_size"]
    assert planned["step_time"] == 1000 * predict(written, read_device(DEFAULT)).seconds


@pytest.fixture
def here(planned, place, monkeypatch):
    """Runs in this process, with what was simulated for the plan."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_a_second_plan_simulates_nothing_new(here, capsys):
    tool.main(["--config", "run.yaml", "--max_memory", LIMIT, "--seconds", "1"])
    printed = capsys.readouterr()
    assert "dry run of the plan" in printed.out
    assert "simulating" not in printed.err


@pytest.mark.slow
def test_a_limit_no_plan_keeps_says_what_would_fit(here):
    with pytest.raises(CheckFailed, match=r"no recomputation fits.*one fits"):
        tool.main(["--config", "run.yaml", "--max_memory", "20MB"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--config", "alone.yaml"), "there is no pipeline to plan"),
        (("--config", "missing.yaml"), "missing.yaml"),
        (("--config", "run.yaml", "--device", "atlas_800t"), "atlas_800t_a2"),
        (("--config", "run.yaml", "--device", "run.yaml"), "run.yaml: name"),
        (("--config", "run.yaml", "--stages", "4"), "is a key of the run; use for example"),
        (("--config", "run.yaml", "--parallel_config.micro_batches=4"), "micro_batch"),
        (("--config", "run.yaml", "--max_memory", "much"), "is not a size"),
        (("--problem", "run.yaml", "--validate"), "requires a run"),
        (("--problem", "run.yaml", "--apply", "--output", "x.yaml"), "RUN.yaml"),
        (("--problem", "run.yaml", "--parallel_config.micro_batch_num=4"), "unknown option; only a run has keys"),
    ],
)
def test_mistakes_are_told(place, options, said, monkeypatch, capsys):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as ended:
        run_command(tool.main, options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (place / "x.yaml").exists()


@pytest.mark.slow
def test_the_number_of_chunks_is_planned_and_confirmed(place, tmp_path):
    options = (
        "--interleave",
        "1",
        "2",
        "--apply",
        "--output",
        str(tmp_path / "planned.yaml"),
        "--seconds",
        "2",
    )
    found = json.loads(run(place, "--config", "run.yaml", "--json", "--max_memory", "165MB", *options))
    assert max(found["dry_run_needed_mb"]) <= 165
    written = load_config(tmp_path / "planned.yaml")
    assert written.model.config.pp_interleave_num == 2
    assert len(found["offset"]) == 2
    assert {layer["chunk"] for layer in found["layers"]} == {0, 1}


@pytest.mark.slow
def test_layers_of_two_types_are_planned_in_order_and_confirmed(tmp_path):
    windows = {"sliding_window": 128, "sliding_window_pattern": 3, "model_type": "gemma2"}
    windows |= {"sandwich_norm": True, "layernorm_zero_centered_gamma": True, "scale_embeddings": True}
    model = {**MODEL, **windows, "hidden_act": "gelu_tanh", "num_layers": 6}
    config = cluster_run(pp=2, micro=4, model=model, runner_config={"batch_size": 4})
    (tmp_path / "run.yaml").write_text(render_config(config), encoding="utf-8")
    options = ("--max_memory", "1GB", "--apply", "--output", "planned.yaml", "--seconds", "2")
    found = json.loads(run(tmp_path, "--config", "run.yaml", "--json", *options))
    assert [layer["layer"] for layer in found["layers"]] == [
        "window 1", "window 1", "global 1", "window 2", "window 2", "global 2"
    ]  # fmt: skip
    assert max(found["dry_run_with_gaps_mb"]) <= 1024
    assert found["peak_memory_mb"] == pytest.approx(found["dry_run_mb"], rel=0.01)
    written = load_config(tmp_path / "planned.yaml")
    assert written.model.config.architecture.layers == config.model.config.architecture.layers
