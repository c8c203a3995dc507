"""Graphs that several tests of ir_inspect look at, each compiled once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.cli.inspect import main
from mindllm.compiled.device.front_end import environment
from mindllm.config import render_config

ROOT = Path(__file__).resolve().parents[2]
FEED_FORWARD = [r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"]
SHARDED = {"dp": 2, "tp": 2, "use_seq_parallel": True, "parallel": {"enable_parallel_optimizer": True}}
RUNS = {
    "norms": (3, {**SHARDED, "recompute_config": {"select_recompute": [r".*\.norm", *FEED_FORWARD]}}),
    "norms and casts": (
        3,
        {**SHARDED, "recompute_config": {"select_recompute": [r".*\.norm", r".*\.cast", *FEED_FORWARD]}},
    ),
    "pipeline": (
        6,
        {**SHARDED, "pp": 2, "micro": 2, "model": {"num_layers": 4}}
        | {"recompute_config": {"recompute": [1, 1], "select_recompute": [2, 2]}},
    ),
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Writes the YAML of a run; returns its path and the rank to look at."""
    directory = tmp_path_factory.mktemp("runs")

    def written(name):
        rank, run = RUNS[name]
        path = directory / f"{name}.yaml"
        path.write_text(render_config(cluster_run(**run)), encoding="utf-8")
        return path, rank

    return written


@pytest.fixture(scope="session")
def kept(runs, tmp_path_factory):
    """Returns the file of a compiled run by name."""
    directory, done = tmp_path_factory.mktemp("graphs"), {}

    def compiled(name):
        if name not in done:
            config, rank = runs(name)
            done[name] = directory / f"{name}.graph"
            main(["save", "--config", str(config), "--rank", str(rank), "--output", str(done[name])])
        return done[name]

    return compiled


@pytest.fixture(scope="session")
def feed_forward(tmp_path_factory):
    """Compiles a feed-forward with Reshapes; recomputes what patterns name; returns the file of its MindIR."""

    def compiled(*patterns):
        path = tmp_path_factory.mktemp("feed_forward") / "net.mindir"
        variables = {**os.environ, **environment(0, 1), "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
        command = [sys.executable, str(ROOT / "tests" / "inspect" / "ir_inspect_net.py"), str(path), *patterns]
        done = subprocess.run(
            command, env=variables, cwd=path.parent, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return path

    return compiled
