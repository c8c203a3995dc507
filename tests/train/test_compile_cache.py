"""The compiled step is loaded on a second start, gives the same numbers, and a changed configuration is compiled anew."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from mindllm.config import load_config
from mindllm.jobs.store import Store
from mindllm.process import temporary
from mindllm.train import compile_cache

YAML = """
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 1e-2}
train_dataset: {data_loader: {config: {data_path: unused}}}
context: {enable_graph_kernel: false}
runner_config: {batch_size: 2}
model:
  model_config: {vocab_size: 61, hidden_size: 16, num_layers: 2, num_heads: 4, intermediate_size: 24, seq_length: 8}
"""
SCRIPT = """
import json, logging, sys
import numpy as np
from mindllm.config import load_config
from mindllm.train import compile_cache
from mindllm.train.device import set_up_device
from mindllm.train.engine import ReplicaEngine
config = load_config("run.yaml", sys.argv[1:])
set_up_device(config)
engine = ReplicaEngine(config)
tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones((2, 8), np.float32)}
losses = [engine.step(batch, 1e-2, 1.0).loss for _ in range(3)]
print(json.dumps([*losses, engine.evaluate(batch)[0]]))
"""
LOADED = "Use the compilation cache"  # what MindSpore says


@pytest.fixture
def start(tmp_path):
    """Starts a process that trains; returns its numbers and whether it loaded the graph."""
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*options):
        command = [sys.executable, "train.py", f"--output_dir={tmp_path}/out", *options]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), LOADED in done.stdout + done.stderr

    return run


def environment():
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "GLOG_v": "2", "PYTHONPATH": root}


def test_a_signal_while_the_compiler_works_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(temporary, "_paths", set())
    monkeypatch.setattr(temporary, "_below", lambda process: [])  # processes of other tests live on
    with compile_cache.store_graphs(Store(tmp_path, "step-"), "0"):
        (unfinished,) = tmp_path.iterdir()
        (unfinished / "graph").touch()
        temporary.leave_nothing()
        assert not unfinished.exists()
        unfinished.mkdir()
    temporary.leave_nothing()
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"], "what is whole stays"


def test_a_second_start_loads_what_the_first_compiled(start, tmp_path):
    first, loaded = start()
    assert not loaded
    (kept,) = load_config(tmp_path / "run.yaml", [f"--output_dir={tmp_path}/out"]).compile_cache_directory.iterdir()
    assert start() == (first, True)

    changed, loaded = start("--runner_wrapper.max_grad_norm=0.01")
    assert not loaded
    assert changed[1:] != first[1:]
    assert not kept.exists()

    damaged = next((tmp_path / "out").rglob("*.mindir"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert start("--runner_wrapper.max_grad_norm=0.01") == (changed, False)


@pytest.mark.parametrize(("layers", "kept"), [(2, 0), (compile_cache.MANY_LAYERS, 1)])
def test_with_fusion_the_graph_of_many_layers_is_kept_too(monkeypatch, tmp_path, layers, kept):
    (tmp_path / "run.yaml").write_text(YAML)
    config = load_config(
        tmp_path / "run.yaml", [f"--model.model_config.num_layers={layers}", f"--output_dir={tmp_path}"]
    )
    names = []
    monkeypatch.setattr(compile_cache, "store_graphs", lambda store, key: names.append(key) or nullcontext())
    for fuses in (False, True):
        monkeypatch.setattr(compile_cache, "uses_graph_kernels", lambda config, fuses=fuses: fuses)
        with compile_cache.cached_compilation(config):
            pass
    assert len(set(names)) == 1 + kept


def test_it_can_be_switched_off(start, tmp_path):
    start("--context.compile_cache=false")
    assert not (tmp_path / "out" / "compile_cache").exists()


@pytest.mark.parametrize("key", ["reset_attention_mask", "reset_position_ids"])
def test_the_columns_of_a_batch_are_part_of_the_step(tmp_path, key):
    (tmp_path / "run.yaml").write_text(YAML)
    option = f"--train_dataset.data_loader.config.{key}"
    plain, apart = (load_config(tmp_path / "run.yaml", options) for options in ([], [option]))
    assert compile_cache.step_key(plain) != compile_cache.step_key(apart)
