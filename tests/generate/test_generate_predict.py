"""Run mode ``predict`` from its configuration: what it writes, and what it refuses before anything is compiled."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny import options, tiny_config, tiny_model

from mindllm.cli.generation import predict
from mindllm.config import load_config
from mindllm.data import load_tokenizer
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.errors import RunFailed, UserError
from mindllm.generate.choosing.growing import Continuation
from mindllm.generate.generator import Generator
from mindllm.models.weights import trained_weights
from mindllm.train.checkpoint import CheckpointStore, RankTensors

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
    checkpoint = CheckpointStore(directory / "checkpoint").save(
        3, {0: RankTensors(arrays, {"moment": np.zeros(1, np.float32)})}, {}
    )
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
    monkeypatch.setattr("mindllm.train.device.set_up_device", lambda config: None)


def configured(run, *overrides):
    return load_config(run[0], overrides)


def test_one_prompt_is_written_with_its_continuation(run, capsys):
    file, model, config = run
    predict(configured(run, "--input_data=def main"))
    written = capsys.readouterr()
    tokenizer = load_tokenizer(file.with_name("tokenizer.json"))
    prompt = tokenizer.encode("def main")
    (result,) = Generator(model, config, tokenizer).generate([prompt], options(12))
    assert written.out == "def main" + tokenizer.decode(result.tokens) + "\n"
    assert "decode: 11 tokens" in written.err
    assert "prefill: " in written.err


def test_the_lines_of_a_file_are_prompts(run, capsys, tmp_path):
    lines = [f"def f{index}(x):" for index in range(3)]
    (tmp_path / "prompts.txt").write_text("\n\n".join(lines))
    sampled = ("--generation.do_sample=true", "--generation.temperature=0.8", "--generation.seed=5")
    predict(configured(run, f"--input_data={tmp_path}/prompts.txt", "--predict_batch_size=2", *sampled))
    written = capsys.readouterr().out
    positions = [written.index(line) for line in lines]
    assert positions == sorted(positions)
    predict(configured(run, f"--input_data=['{lines[2]}']", *sampled))
    assert capsys.readouterr().out.strip() in written, "a prompt continues alike alone and in the second batch"


CONVERSATION = [{"role": "system", "content": "def"}, {"role": "user", "content": "main"}]


@pytest.fixture
def asked(tmp_path):
    """A JSON Lines file of three requests."""
    lines = [{"prompt": "def main", "id": 7}, {"messages": CONVERSATION}, {"prompt": "return \u2028 über"}]
    (tmp_path / "asked.jsonl").write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    return tmp_path / "asked.jsonl", lines


def test_json_lines_in_and_out(run, asked, tmp_path, capsys):
    (file, lines), saved = asked, tmp_path / "new" / "results.jsonl"
    options_ = (f"--input_data={file}", "--predict_batch_size=2", "--generation.output_logprobs")
    predict(configured(run, *options_, f"--save_file={saved}"))
    assert capsys.readouterr().out == ""
    text = saved.read_text(encoding="utf-8")
    results = [json.loads(line) for line in text.removesuffix("\n").split("\n")]
    assert [{key: result[key] for key in line} for result, line in zip(results, lines, strict=True)] == lines
    for result in results:
        (continuation,) = result["continuations"]
        assert len(continuation["tokens"]) == len(continuation["logprobs"]) == 12
        assert continuation["finish_reason"] == "length"
        assert max(continuation["logprobs"]) < 0
    predict(configured(run, *options_))
    assert capsys.readouterr().out == text
    predict(configured(run, "--input_data=def main"))
    assert capsys.readouterr().out == "def main" + results[0]["continuations"][0]["text"] + "\n"
    plain = "def\n\n### Instruction:\nmain\n\n### Response:\n"
    predict(configured(run, f"--input_data={json.dumps(plain)}"))
    assert capsys.readouterr().out == plain + results[1]["continuations"][0]["text"] + "\n"


def test_beams_have_scores_and_the_best_comes_first(run, asked, capsys):
    beams = "--generation={num_beams: 3, num_return_sequences: 2, max_new_tokens: 5}"
    predict(configured(run, f"--input_data={asked[0]}", beams))
    for line in capsys.readouterr().out.removesuffix("\n").split("\n"):
        first, second = json.loads(line)["continuations"]
        assert first["score"] >= second["score"]


def test_results_are_whole_or_absent(run, asked, tmp_path, monkeypatch):
    saved = tmp_path / "results.jsonl"
    saved.write_text("of an earlier run")

    def breaks(*_):
        yield [Continuation([1], "length", "a")]
        raise RunFailed("the third batch failed")

    monkeypatch.setattr(Generator, "generate_in_batches", breaks)
    with pytest.raises(RunFailed):
        predict(configured(run, f"--input_data={asked[0]}", f"--save_file={saved}"))
    assert saved.read_text() == "of an earlier run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked.jsonl", "results.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("def main", r"asked.jsonl:2: not JSON .*write \{\"prompt\""),
        ("[1]", "asked.jsonl:2: neither a prompt nor a conversation"),
        ("{}", "neither a prompt nor"),
        ('{"prompt": "a", "messages": []}', "neither a prompt nor"),
        ('{"prompt": 3}', r"prompt is not a text \(value 3\)"),
        ('{"messages": []}', "not a list of at least one"),
        ('{"messages": [{"role": "user"}]}', "content of the user is not text but None"),
        ('{"messages": [{"role": "usr", "content": "a"}]}', "unknown role 'usr'; did you mean 'user'"),
    ],
)
def test_lines_that_ask_nothing_are_told(run, tmp_path, line, message):
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(UserError, match=message):
        predict(configured(run, f"--input_data={tmp_path}/asked.jsonl"))


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
        ("--input_data=nothing.jsonl", "input_data.*nothing.jsonl: no such file"),
        ("--save_file=/proc/nothing/results.jsonl", "save_file.*cannot be written"),
        ("--save_file=/tmp", "save_file.*is a directory"),
    ],
)
def test_mistakes_are_told(run, override, message):
    with pytest.raises(UserError, match=message):
        predict(configured(run, "--input_data=def", override))


def start(run, directory):
    """The command line on a prompt, writing for longer than any signal takes to arrive."""
    command = [sys.executable, ROOT / "run_llm.py", "--config", run[0], "--input_data=def"]
    return subprocess.Popen(
        [*map(str, command), "--model.model_config.seq_length=8192", "--generation.max_new_tokens=8000"],
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
