"""Run mode ``predict`` from its configuration: what it writes, and what it refuses before anything is compiled."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny import options, tiny_config, tiny_model

from mindllm.config import load_config
from mindllm.data import load_tokenizer
from mindllm.data.tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.errors import UserError
from mindllm.generate.generator import Generator
from mindllm.generate.predict import predict
from mindllm.models.weights import trained_weights
from mindllm.train.checkpoint import CheckpointStore

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 270
SHAPE = {"vocab_size": VOCABULARY, "n_kv_heads": 2, "seq_length": 256}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The YAML of a run with a checkpoint of random weights and a tokenizer, and the model in the checkpoint."""
    directory = tmp_path_factory.mktemp("run")
    save_tokenizer(
        train_byte_level_bpe(["def main(): return main() def main(): return"], 264), directory / "tokenizer.json"
    )
    config = tiny_config(**SHAPE)
    model = tiny_model(config)
    arrays = {name: item.asnumpy() for name, item in trained_weights(model).items()}
    checkpoint = CheckpointStore(directory / "checkpoint").save(3, arrays, {"moment": np.zeros(1, np.float32)}, {})
    keys = {
        "run_mode": "predict",
        "output_dir": str(directory),
        "load_checkpoint": str(checkpoint),
        "model": {"model_config": config.model_dump(exclude_unset=True)},
        "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3},
        "processor": {"tokenizer": {"vocab_file": str(directory / "tokenizer.json")}},
        "generation": {"max_new_tokens": 12},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(keys))
    return directory / "run.yaml", model, config


@pytest.fixture(autouse=True)
def _device_of_the_tests(monkeypatch):
    """The device cannot be chosen again in a process that has run a graph."""
    monkeypatch.setattr("mindllm.generate.predict.set_up_device", lambda config: None)


def configured(run, *overrides):
    return load_config(run[0], overrides)


def test_one_prompt_is_written_with_its_continuation(run, capsys):
    file, model, config = run
    assert predict(configured(run, "--input_data=def main")) == 0
    written = capsys.readouterr()
    tokenizer = load_tokenizer(file.with_name("tokenizer.json"))
    prompt = tokenizer.encode("def main")
    (result,) = Generator(model, config, tokenizer).generate([prompt], options(12))
    assert written.out == "def main" + tokenizer.decode(result.tokens) + "\n"
    assert "decode: 11 tokens" in written.err
    assert "prefill: " in written.err


def test_the_lines_of_a_file_are_prompts(run, capsys, tmp_path, monkeypatch):
    lines = [f"def f{index}(x):" for index in range(3)]
    (tmp_path / "prompts.txt").write_text("\n\n".join(lines))
    sampled = ("--generation.do_sample=true", "--generation.temperature=0.8", "--generation.seed=5")
    predict(configured(run, f"--input_data={tmp_path}/prompts.txt", *sampled))
    written = capsys.readouterr().out
    positions = [written.index(line) for line in lines]
    assert positions == sorted(positions)
    predict(configured(run, f"--input_data=['{lines[2]}']", *sampled))
    assert capsys.readouterr().out.strip() in written, "a prompt continues alike alone and in the second batch"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--load_checkpoint=", r"load_checkpoint.*needs weights.*--load_checkpoint .*llm-3"),
        ("--input_data=null", "input_data.*needs a prompt"),
        ("--input_data=[]", "input_data.*holds no prompt"),
        ("--input_data=['']", "the prompt is empty"),
        ("--processor.tokenizer.vocab_file=", "processor.tokenizer.vocab_file.*tokenizer"),
        ("--generation.max_new_tokens=300", "max_new_tokens=.* at most"),
        ("--model.model_config.hidden_size=64", "does not fit the model"),
        ("--load_checkpoint=nowhere", "nowhere does not exist"),
    ],
)
def test_mistakes_are_told(run, override, message):
    with pytest.raises(UserError, match=message):
        predict(configured(run, "--input_data=def", override))


def start(run, directory):
    """The command line on a prompt, writing for some time."""
    command = [sys.executable, ROOT / "run_llm.py", "--config", run[0], "--input_data=def"]
    return subprocess.Popen(
        [*map(str, command), "--generation.max_new_tokens=250"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=directory,
        env={**os.environ, "GLOG_v": "3"},
    )


def test_ctrl_c_ends_cleanly(run, tmp_path):
    process = start(run, tmp_path)
    assert process.stdout.read(12).startswith(b"def")
    process.send_signal(signal.SIGINT)
    written, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert written.endswith(b"\n")
    assert b"decode: " in errors
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_a_reader_may_leave(run, tmp_path):
    process = start(run, tmp_path)
    assert process.stdout.read(3) == b"def"
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
