"""MindFormers itself through the offline tool: ``bash scripts/mindformers.sh`` makes its environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindllm.compiled.inspect.comm import PIPELINE, exchanges
from mindllm.compiled.inspect.source import read_graph
from mindllm.compiled.simulation.simulation import load_simulation
from tests.compiled.simulations import needs_compiler
from toolkit.benchmark.mindformers import DATA, ENVIRONMENT, EXAMPLE, changed

PYTHON = Path(os.environ.get("MINDFORMERS_PYTHON", ENVIRONMENT / "bin" / "python"))
SMALL = {
    "model.model_config.hidden_size": 64,
    "model.model_config.intermediate_size": 128,
    "model.model_config.vocab_size": 256,
    "model.model_config.num_hidden_layers": 2,
    "model.model_config.num_attention_heads": 4,
    "model.model_config.num_key_value_heads": 2,
    "model.model_config.head_dim": 16,
    "model.model_config.seq_length": 64,
    "model.model_config.max_position_embeddings": 64,
    "recompute_config.recompute": False,
    "parallel_config.micro_batch_num": 2,
}
pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason="bash scripts/mindformers.sh has not made MindFormers' environment"
    ),
]


def _run(command, directory):
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory, timeout=1500)


@pytest.mark.timeout(1800)
def test_mindformers_trains_without_a_device(tmp_path):
    data = [str(PYTHON), str(EXAMPLE / "make_data.py"), "--seq_length=64", "--rows=16", DATA]
    made = _run(data, tmp_path)
    assert made.returncode == 0, made.stderr
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(changed(SMALL)))
    program = [str(PYTHON), str(EXAMPLE / "run_mindformer.py"), "--config", str(tmp_path / "theirs.yaml")]
    tool = [sys.executable, "-m", "mindllm.main", "offline", "--json", "--keep", str(tmp_path / "kept"), "--", *program]
    result = _run(tool, tmp_path)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["mindspore"].startswith("2.7")
    assert [(row["rank"], row["stage"], row["limit_mb"]) for row in said["ranks"]] == [(0, 0, 59392), (4, 1, 59392)]
    for row in said["ranks"]:
        directory = Path(row["kept"])
        simulation = load_simulation(directory / "simulation.json.gz")
        assert sum(simulation.peak_by_category().values()) == simulation.used_peak > 0
        found = [exchange for exchange in exchanges(read_graph(directory).graph) if exchange.cause == PIPELINE]
        assert {exchange.operator for exchange in found} == {"Send", "Receive"}
