"""A corpus of hostile inputs, through the command lines: an error of a line or two and its exit code, never a traceback."""

import gzip
import io
import os
import re
import sys

import pytest
import yaml

from mindllm.cli.check import main as check
from mindllm.cli.data import main as preprocess
from mindllm.cli.dry_run import main as dry_run
from mindllm.cli.inspect import main as inspect
from mindllm.cli.loss_curve import main as curve
from mindllm.cli.plan import main as plan
from mindllm.cli.run import main as run_llm
from mindllm.cli.view import main as view
from mindllm.cli.weights import main as weights
from mindllm.command import run_command
from toolkit.config_reference.__main__ import main as reference

CONTENTS = {
    "half a surrogate pair": rb'{"text": "a\ud800b", "instruction": "\udc00", "output": "x"}',
    "invalid UTF-8": b'{"text": "a\xff\xfe", "instruction": "\xff", "output": "x"}',
    "100,000 brackets": b"[" * 100_000,
    "100,000 objects": b'{"text":' * 100_000,
    "5,000 digits": b'{"text": "x", "instruction": "a", "output": "b", "n": ' + b"9" * 5000 + b"}",
    "zeros": b"\0\0\0\0",
    "a list": b"[1, 2, 3]",
    "not a number": b'{"text": NaN, "instruction": NaN, "output": Infinity}',
    "UTF-16": '{"text": "abc"}'.encode("utf-16"),
    "null": b"null",
    "nothing": b"",
    "blank lines": b"\n\n\n",
    "wrong types": b'{"text": {"a": 1}, "instruction": [1], "output": {"x": []}}',
    "messages of wrong types": b'{"messages": [["role", "user"]], "conversations": 5}',
    "a role that is a list": b'{"messages": [{"role": ["user"], "content": "x"}]}',
    "a speaker that is an object": b'{"conversations": [{"from": {"x": 1}, "value": "y"}]}',
    "half a turn": b'{"instruction": "a", "output": "b", "history": [["x"]]}',
    "an escape sequence": b'{"\\u001b[31mred": "\\u001b]0;title\\u0007"}',
}
contents = pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
HANDLERS = ("AlpacaPretrainHandler", "StackOverflowPythonPretrainHandler")
LOADER = "train_dataset.data_loader.config"


@pytest.fixture
def ended(capsys, tmp_path, monkeypatch):
    """Runs a command line in this process and a directory of its own; returns exit code and what it said of it."""
    monkeypatch.chdir(tmp_path)

    def end(main, *arguments, codes=(2,)):
        with pytest.raises(SystemExit) as left:  # any other exception is the traceback this is about
            run_command(main, [str(argument) for argument in arguments])
        said = capsys.readouterr().err
        assert left.value.code in codes, said
        assert "Traceback" not in said
        assert "\x1b" not in said
        assert left.value.code == 0 or len(said) < 2500 + sum(len(str(word)) for word in arguments), said[:3000]
        return said

    return end


@pytest.fixture
def run_file(config_file, corpus, tmp_path):
    """The small run on conversations that a test writes."""
    tree = yaml.safe_load(config_file.read_text())
    section = {"data_path": "rows.jsonl", "split": "1"}
    tree["train_dataset"] = {"data_loader": {"type": "CommonDataLoader", "config": section}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**tree, "do_eval": False}))
    (tmp_path / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    return path


@contents
def test_records_and_texts(content, ended, run_file, tmp_path):
    options = ("--tokenizer", "tokenizer.json", "--workers", 1, "--overwrite")
    for ending in ("jsonl", "json", "csv", "parquet", "jsonl.gz"):
        (tmp_path / f"a.{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
        ended(preprocess, f"a.{ending}", *options, "--output-prefix", ending, codes=(0, 2))
    ended(preprocess, "a.jsonl", *options, "--format", "text", "--output-prefix", "text", codes=(0, 2))
    for handler in HANDLERS:
        ended(preprocess, "a.jsonl", *options, "--handler-name", handler, "--output-prefix", handler, codes=(0, 2))


@contents
@pytest.mark.parametrize("handler", ["auto", "messages", "sharegpt", "alpaca", "MOSSMultiTurnHandler"])
def test_rows_of_conversations(content, handler, ended, run_file, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(content)
    ended(view, "--config", run_file, f"--{LOADER}.handler={handler}", codes=(0, 2))


@contents
def test_problems_configurations_and_graphs(content, ended, tmp_path):
    file = tmp_path / "given"
    file.write_bytes(content)
    (tmp_path / "directory").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "directory" / name).write_bytes(content)
    for option in ("--problem", "--measured", "--config"):
        ended(plan, option, file)
    ended(run_llm, "--config", file, "--print_config")
    ended(weights, "info", "directory")
    ended(inspect, "summary", file)
    ended(curve, "directory")


@pytest.mark.parametrize("field", ["forward", "count", "activation_mb"])
@pytest.mark.parametrize("value", ["9" * 5000, "9" * 4000, "1e400", "-1", "null", '"x"', "1e300"])
def test_figures_of_a_planning_problem(field, value, ended, tmp_path):
    kinds = '{"none": {"backward": 2, "activation_mb": %s}}' % (value if field == "activation_mb" else 1)
    layer = {"forward": "1", "count": "4"} | ({field: value} if field != "activation_mb" else {})
    text = '{"stages": 2, "micro_batches": 4, "layers": [{"name": "a", "forward": %s, "count": %s, "kinds": %s}]}'
    (tmp_path / "problem.json").write_text(text % (layer["forward"], layer["count"], kinds))
    said = ended(plan, "--problem", "problem.json")
    assert "problem.json" in said
    assert "Input should" not in said


@contents
def test_prompts(content, ended, run_file, tmp_path):
    options = ("--config", run_file, "--run_mode", "predict", "--load_checkpoint", "nowhere")
    for name in ("prompts.jsonl", "prompts.txt"):
        (tmp_path / name).write_bytes(content)
        ended(run_llm, *options, "--input_data", name)


@pytest.mark.parametrize("line", [rb'{"prompt": "\ud800"}', b'{"prompt": "\xff"}', b'{"prompt": ' * 50_000])
def test_bad_prompts_are_told_with_their_line(line, ended, run_file, tmp_path):
    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    options = ("--config", run_file, "--run_mode", "predict", "--load_checkpoint", "nowhere")
    said = ended(run_llm, *options, "--input_data", "prompts.jsonl")
    assert re.search(r"prompts\.jsonl(:2: |: .*\(line 2, byte 0xff\))", said)


def test_bytes_that_are_not_text_on_the_command_line(ended, run_file):
    said = ended(run_llm, "--config", run_file, "--run_mode", "predict", "--input_data", os.fsdecode(b"a\xff"))
    assert "not UTF-8" in said


def test_a_line_of_chat_that_is_not_text_is_told_and_the_next_one_read(capsys, monkeypatch):
    from mindllm.cli.generation import _input_lines

    typed = io.TextIOWrapper(io.BytesIO(b"a\xff\n" + "größer\n".encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    assert list(_input_lines()) == ["größer"]
    assert capsys.readouterr().err == "the line is not valid UTF-8; write it again\n"


IMPOSSIBLE = ["", "a_file/x", "/proc/x/y", "a_directory", "a" * 300, "x/" * 2500 + "y"]


@pytest.mark.parametrize("path", IMPOSSIBLE, ids=lambda path: path[:12] or "empty")
def test_paths_where_nothing_can_be_written(path, ended, run_file, tmp_path):
    (tmp_path / "a_file").write_text("x")
    (tmp_path / "a_directory").mkdir()
    (tmp_path / "text.txt").write_text("some text\n")
    problem = ("--problem", "nowhere.json")
    commands = [
        (plan, *problem, "--yaml", path),
        (plan, *problem, "--picture", path),
        (plan, "--config", path),
        (plan, *problem, "--manual", path),
        (preprocess, "text.txt", "--tokenizer", "tokenizer.json", "--output-prefix", path),
        (preprocess, "text.txt", "--tokenizer", path, "--output-prefix", "out"),
        (preprocess, path, "--tokenizer", "tokenizer.json", "--output-prefix", "out"),
        (check, "--config", run_file, "--table", path),
        (check, "--config", run_file, "--cache", path),
        (dry_run, "--config", run_file, "--output", path),
        (inspect, "save", "nowhere.graph", "--output", path),
        (weights, "info", path),
        (weights, "import", path, path),
        (curve, "nowhere", "--output", path),
        (reference, "--output", path),
        (view, "--config", run_file, f"--{LOADER}.data_path={path}"),
        (view, "--config", run_file, f"--processor.tokenizer.vocab_file={path}"),
    ]
    for main, *arguments in commands:
        ended(
            main, *arguments, codes=(0, 2) if not path else (2,)
        )  # nothing is this directory, whose files can be read


@pytest.mark.parametrize("path", ["a_file/x", "a" * 300])
@pytest.mark.parametrize("key", ["output_dir", "export_hf.directory", "context.compile_cache_path", "save_file"])
def test_paths_of_a_run_are_refused_before_it_begins(path, key, ended, config_file, tmp_path):
    (tmp_path / "a_file").write_text("x")
    options = ["--run_mode=predict", "--input_data=x", "--load_checkpoint=nowhere"] if key == "save_file" else []
    options += ["--context.compile_cache=true"] if "cache" in key else []
    assert key in ended(run_llm, "--config", config_file, f"--{key}={path}", *options)


def test_a_cache_that_cannot_be_written_is_told_once_and_done_without(monkeypatch, caplog, tmp_path):
    from mindllm.cache import user_cache

    (tmp_path / "a_file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
    first = user_cache("graphs")
    assert first.is_dir()
    assert user_cache("graphs") == first
    assert user_cache("dry_run").is_relative_to(first.parent)
    assert caplog.text.count("cannot be written") == 1


HUGE = {
    "layers": ["--model.model_config.num_layers=1000000000"],
    "positions": [
        "--model.model_config.seq_length=1000000000000",
        "--model.model_config.max_position_embedding=1000000000000",
    ],
    "rows": ["--runner_config.batch_size=1000000000"],
    "width": ["--model.model_config.hidden_size=1000000000", "--model.model_config.num_heads=1000000"],
    "words": ["--model.model_config.vocab_size=1000000000000"],
    "beyond 64 bits": ["--model.model_config.vocab_size=" + "9" * 30],
    "beams": ["--generation.num_beams=100000", "--run_mode=predict", "--input_data=x", "--load_checkpoint=nowhere"],
    "steps of accumulation": ["--runner_config.gradient_accumulation_steps=1000000000"],
}


@pytest.mark.parametrize("options", HUGE.values(), ids=HUGE)
def test_sizes_no_machine_has_are_refused_before_anything_is_allocated(options, ended, config_file):
    said = ended(run_llm, "--config", config_file, *options)
    assert options[0].split("=")[0].lstrip("-") in said
