"""A GGUF file and nothing else: fine-tuned, its adapter exported and merged; rounded; its network trained from new weights."""

import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from tiny_chat import WORDS, conversation, write_rows
from tiny_chat_gguf import save_tiny_chat_gguf

from mindllm.cli.train import read_train
from mindllm.command import run_command
from mindllm.config import load_config, read_model_config, render_config
from mindllm.main import main
from mindllm.recipes.model_source import find_model
from mindllm.recipes.network import find_network
from mindllm.weight_files import merged_pretrained, read_hugging_face

QUICK = ("--context.enable_graph_kernel=false", "--context.compile_cache=false", "--runner_config.train_steps=2")


def directory_tensors(directory):
    """All tensors of the safetensors files of a directory."""
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return save_tiny_chat_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


def call(*words):
    with pytest.raises(SystemExit) as left:
        run_command(main, [str(word) for word in words])
    return left.value.code


def test_a_fine_tuning_over_a_file_knows_it_and_is_merged_and_exported(file, tmp_path, capsys):
    rows, run = write_rows(tmp_path / "chats.jsonl", map(conversation, range(30))), tmp_path / "run"
    assert call("finetune", file, rows, "--output", run, *QUICK, "--lr_schedule.warmup_ratio=0") == 0
    model = find_model(run)
    assert (model.directory, model.tokenizer, model.is_tuned) == (file, str(file), True)
    checkpoint = str(run / "checkpoint" / "llm-2")
    assert call("weights", "merge", checkpoint, tmp_path / "merged") == 0
    merged = read_hugging_face(tmp_path / "merged", read_model_config(tmp_path / "merged"))
    _, used = merged_pretrained(load_config({"load_checkpoint": checkpoint, "run_mode": "predict"}))
    before = read_hugging_face(file, read_model_config(file))
    for name, weight in merged.items():
        np.testing.assert_array_equal(np.asarray(weight), np.asarray(used[name]))
    assert any(not np.array_equal(np.asarray(merged[name]), np.asarray(before[name])) for name in before)
    assert find_model(tmp_path / "merged").tokenizer == str(tmp_path / "merged" / "tokenizer.json")
    assert call("weights", "adapter", checkpoint, tmp_path / "adapter") == 0
    assert find_model(tmp_path / "adapter").directory == file
    assert call("weights", "export", checkpoint, tmp_path / "no") == 2
    assert f"mindllm weights merge {checkpoint} DIR" in capsys.readouterr().err
    assert call("quantize", run, tmp_path / "no") == 2
    assert f"mindllm weights merge {checkpoint} DIR" in capsys.readouterr().err
    for tuned in (run, tmp_path / "adapter"):
        network = find_network(str(tuned))
        assert (network.name, network.directory, network.tokenizer) == (tuned.name, file, str(file))
    file.rename(file.with_suffix(".moved"))
    try:
        assert call("generate", run, "--prompt", "import", "--output", tmp_path / "a.jsonl") == 2
    finally:
        file.with_suffix(".moved").rename(file)
    said = capsys.readouterr().err
    assert (str(file) in said, "Traceback" in said) == (True, False), said


def test_a_file_is_rounded_in_groups_that_fit_it(file, tmp_path, capsys):
    assert call("quantize", file, tmp_path / "int4") == 0
    told = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert (told["bits"], told["group_size"]) == (4, 32)  # columns are 64 and 96
    assert find_model(tmp_path / "int4").tokenizer == str(tmp_path / "int4" / "tokenizer.json")
    capsys.readouterr()
    assert call("quantize", "--config", tmp_path / "int4.yaml") == 2
    assert "int4: exists already" in capsys.readouterr().err
    (tmp_path / "int4").rename(tmp_path / "first")
    assert call("quantize", "--config", tmp_path / "int4.yaml", "--max_shard_size", "40.5KB") == 0
    assert "max_shard_size: 40.500KB" in (tmp_path / "int4.yaml").read_text()
    ours, theirs = (directory_tensors(tmp_path / name) for name in ("int4", "first"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert call("quantize", "--config", tmp_path / "int4.yaml", file, tmp_path / "again", "--group", "48") == 2
    assert "has 64 columns, which is not a multiple; use --group 32" in capsys.readouterr().err


def test_its_network_is_looked_at_and_its_run_made(file, tmp_path, capsys):
    network = find_network(str(file))
    assert (network.name, network.tokenizer, network.architecture.hidden_size) == ("tiny", str(file), 64)
    text = write_rows(tmp_path / "corpus.jsonl", ({"text": " ".join(WORDS * 9)} for _ in range(30)))
    words = ["--like", file, text, "--output", tmp_path / "out", "--seq_length=64"]
    assert call("pretrain", *words, "--print_config") == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    _, config = read_train([str(word) for word in words], "pretrain")
    assert yaml.safe_load(render_config(config)) == yaml.safe_load(printed), "what is counted is what is built"
    assert (config.pretrained_model_dir, config.load_checkpoint) == (str(file), "")
