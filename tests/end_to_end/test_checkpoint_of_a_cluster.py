"""A checkpoint that the ranks of a cluster saved in parts is used on one CPU as if it were whole, through the command line."""

import pytest
from command_line import read_lines, run, trajectory

from mindllm.cli.weights import main as weights_tool
from mindllm.compiled.rank.compile_ranks import compile_ranks
from mindllm.config import load_config, override_config
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.verify.side import build_cluster

STEP = 8
LAYOUT = {
    "use_parallel": True,
    "context.device_target": "Ascend",
    "parallel_config.model_parallel": 2,
    "parallel_config.use_seq_parallel": True,
}


@pytest.fixture(scope="module")
def whole(finished):
    return finished[0] / "checkpoint" / f"llm-{STEP}"


@pytest.fixture(scope="module")
def parts(whole, config_file, graph_cache, tmp_path_factory):
    """The same checkpoint as two tensor-parallel ranks keep it: some weights cut by rows, some by columns."""
    checkpoint = load_checkpoint(whole)
    config = override_config(load_config(config_file), LAYOUT)
    state = {**checkpoint.weights, **checkpoint.optimizer}
    cluster = build_cluster(config, compile_ranks(config, graph_cache), state)
    store = CheckpointStore(tmp_path_factory.mktemp("cluster"))
    path = store.save(STEP, cluster.local_state(), checkpoint.state)
    assert len(list(path.glob("model-*-of-00002.safetensors"))) == 2
    return path


def test_a_run_resumes_bit_identically(parts, finished, config_file, tmp_path):
    run(config_file, tmp_path / "out", f"--resume_training={parts}")
    assert trajectory(tmp_path / "out") == trajectory(finished[0])[STEP:]


@pytest.mark.slow
def test_it_is_evaluated_and_asked(whole, parts, config_file, tmp_path):
    asked = ("--run_mode=predict", "--input_data=def ", "--generation={max_new_tokens: 8}")
    answers = []
    for path in (whole, parts):
        run(config_file, tmp_path / "out", *asked, f"--load_checkpoint={path}", "--save_file=results.jsonl")
        answers.append(read_lines(tmp_path / "results.jsonl"))
    assert answers[0] == answers[1]
    printed = run(config_file, tmp_path / "out", "--run_mode=eval", f"--load_checkpoint={parts}")
    assert "on the valid split: " in printed


def test_it_is_exported_and_described(whole, parts, tmp_path, capsys):
    for path, name in ((whole, "whole"), (parts, "parts")):
        assert weights_tool(["export", str(path), str(tmp_path / name)]) == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    assert weights_tool(["info", str(parts)]) == 0
    assert "model-00001-of-00002.safetensors" in capsys.readouterr().out
