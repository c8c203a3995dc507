"""The command line of mindllm convert, and run_llm.py and the tools on a YAML of MindFormers as it is."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from mindllm.cli import run as run_llm
from mindllm.cli.convert import main
from mindllm.config import load_config, render_config
from mindllm.config.reading.load import read_file
from mindllm.errors import UserError
from mindllm.mindformers.reader import convert, is_mindformers
from mindllm.mindformers.report import account
from tests.mindformers.mindformers_files import LEGACY, MCORE, writer
from toolkit.benchmark.mindformers_yamls import convert_all
from toolkit.benchmark.mindformers_yamls import main as count

PIPELINE = {
    "parallel_config.data_parallel": 2,
    "parallel_config.pipeline_stage": 4,
    "parallel_config.micro_batch_num": 8,
}


@pytest.fixture
def theirs(tmp_path):
    """Writes a file of MindFormers."""
    return writer(tmp_path)


def test_the_account_names_every_key_and_ours_is_short(theirs, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    source, ours = theirs(LEGACY, PIPELINE), tmp_path / "new" / "ours.yaml"
    assert main([str(source), "-o", str(ours)]) == 0
    shown = capsys.readouterr().out
    for words in ("optimizer.type", "without bias correction", "checkpoints hold whole parameters", "wrote"):
        assert words in shown
    text = ours.read_text()
    assert text.startswith("# Converted from theirs.yaml")
    assert "pretrain_llama2_7b.yaml" in text
    assert len(text.splitlines()) < 60
    assert load_config(ours) == load_config(source)


def test_what_is_read_is_not_written_over(theirs):
    source = theirs(LEGACY)
    before = source.read_bytes()
    with pytest.raises(UserError, match=r"would overwrite the input; use another name"):
        main([str(source), "-o", str(source.parent / "." / source.name)])
    assert source.read_bytes() == before


def test_without_output_ours_is_printed(theirs, capsys):
    assert main([str(theirs(MCORE)), "--train_dataset_dir", "data/wiki"]) == 0
    shown = capsys.readouterr().out
    assert "base: " in shown
    assert "data_path: data/wiki" in shown


def test_the_account_can_be_cut_to_what_changes(theirs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # one line for each key, however long the path of the file
    source = str(theirs(LEGACY))
    assert main([source]) == 0
    whole = capsys.readouterr().out
    assert main([source, "--changes"]) == 0
    changes = capsys.readouterr().out
    assert changes.count("translated") == whole.count("translated") > 3
    assert whole.count("without effect") > 3
    assert changes.count("without effect") == 1  # the sum still counts them


def test_json_has_everything(theirs, capsys):
    assert main([str(theirs(LEGACY)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["counts"].values()) == sum(entry["line"] is not None for entry in told["keys"])
    assert yaml.safe_load(told["yaml"])["optimizer"]["bias_correction"] is False
    assert not told["problems"]


def test_what_is_refused_is_told_and_nothing_is_written(theirs, tmp_path, capsys):
    source = theirs(LEGACY, {"only_save_strategy": True})
    with pytest.raises(UserError, match=r"mindllm dry-run") as caught:
        main([str(source), "-o", str(tmp_path / "ours.yaml")])
    assert caught.value.exit_code == 2
    assert "refused" in capsys.readouterr().out
    assert not (tmp_path / "ours.yaml").exists()
    with pytest.raises(UserError):
        main([str(source), "--json"])
    assert json.loads(capsys.readouterr().out)["yaml"] is None


def test_a_yaml_of_ours_is_no_input(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text("seed: 1\nzeal: 2\n")
    with pytest.raises(UserError, match="is not a YAML of MindFormers: it has too few keys"):
        main([str(path)])
    for text in ("seed: 1\n", "base: configs/base/pretrain.yaml\nseed: 1\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"is already a YAML of mindllm; .* use --to mindformers-2$"):
            main([str(path)])


def test_run_llm_takes_theirs_and_its_options(theirs, capsys):
    options = ["--print_config", "--train_dataset_dir", "data/a.mindrecord", "--auto_trans_ckpt", "False"]
    assert run_llm.main(["--config", str(theirs(LEGACY)), *options]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert told["train_dataset"]["data_loader"]["config"]["data_path"] == "data/a.mindrecord"
    assert told["model"]["model_config"]["num_layers"] == 32


def test_the_count_is_by_network_and_reason(theirs, tmp_path, capsys):
    theirs(LEGACY, name="a.yaml")
    theirs(MCORE, name="b.yaml")
    theirs(LEGACY, {"only_save_strategy": True}, name="c.yaml")
    theirs(LEGACY, {"run_mode": "predict"}, name="d.yaml")
    (tmp_path / "other.yaml").write_text("seed: 1\n")
    results = list(convert_all([tmp_path]))
    assert [bool(result.reason) for result in results] == [False, False, True]
    assert count([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown
    assert "mindllm dry-run" in shown
    with pytest.raises(UserError, match="no YAML of MindFormers below"):
        count([str(tmp_path / "nothing")])


WHEEL = "mindformers==1.8.0"


@pytest.mark.slow
def test_the_yamls_of_a_wheel_convert_or_are_refused_for_a_reason(tmp_path):
    """Every YAML of the wheel is recognised, none has a key that is unknown, and the dense one of Llama's kind converts."""
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--quiet", "--dest", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("pip cannot download here")
    wheel = next(tmp_path.glob("*.whl"))
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "wheel")], check=True)
    files = [path for path in (tmp_path / "wheel" / "configs").rglob("*.yaml") if "train_dataset:" in path.read_text()]
    assert len(files) >= 6
    assert all(map(is_mindformers, map(read_file, files)))
    reasons = [result.reason for result in convert_all([tmp_path / "wheel"], predict=True)]
    assert reasons
    assert not [reason for reason in reasons if "unknown key" in reason]


def test_none_of_python_is_read_as_nothing(theirs, capsys):
    """A run of theirs with ``None`` is that with null, and every place of it is told."""
    source = theirs(
        LEGACY, {**PIPELINE, "load_checkpoint": "None", "model.model_config.checkpoint_name_or_path": "None"}
    )
    without = theirs(LEGACY, {**PIPELINE, "load_checkpoint": None}, "null.yaml")
    assert render_config(load_config(source)) == render_config(load_config(without))
    conversion = convert(read_file(source))
    (said,) = [warning for warning in conversion.warnings if "None" in warning]
    assert said.startswith("None is a text in YAML, and read as null here: ")
    assert {*said.rpartition(": ")[2].split(", ")} == {"load_checkpoint", "model.model_config.checkpoint_name_or_path"}


@pytest.mark.parametrize("width", [80, 40, 240])
def test_the_account_fits_the_terminal(tmp_path, width):
    path = writer(tmp_path)(MCORE, {"run_mode_of_a_later_release": "x " * 100, "swap_config.swap": True})
    conversion = convert(read_file(path), ["--ignore-unknown-keys"])
    console = Console(width=width, file=io.StringIO())
    for part in account(Path("theirs.yaml"), conversion):
        console.print(part)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    counts = {outcome.value: count for outcome, count in conversion.counts().items()}
    if width == 240:
        assert lines[1].split() == ["line", "key", "value", "here", "why"]
    else:
        assert f"used: {counts['used']}" in lines
        assert any(line.startswith(" 139  model.model_config.num_hidden_l") for line in lines)
