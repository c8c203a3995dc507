"""``mindllm finetune DIR DATA`` and ``pretrain --like``: mistakes before anything compiles, and a run that its YAML repeats."""

import json
import os

import pytest
from tiny_chat import WORDS, conversation, save_tiny_chat_model, write_rows

from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.main import main
from mindllm.recipes.model_source import find_model
from mindllm.train.job.output_directory import RunLock, require_unlocked
from mindllm.train.metrics_file import read_metrics

QUICK = ("--context.enable_graph_kernel=false", "--context.compile_cache=false")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_tiny_chat_model(path / "tiny")
    return path


@pytest.fixture
def chats(tmp_path):
    return write_rows(tmp_path / "chats.jsonl", map(conversation, range(30)))


@pytest.fixture
def said(capsys):
    """Exit code and standard error of a command."""

    def call(*words):
        with pytest.raises(SystemExit) as left:
            run_command(main, [str(word) for word in words])
        return left.value.code, capsys.readouterr().err

    return call


def losses(directory):
    return [record["loss"] for record in read_metrics(directory / "metrics.jsonl")]


def test_the_yaml_of_a_run_that_trains_is_not_written_over(models, chats, tmp_path, said):
    run = tmp_path / "run"
    run.mkdir()
    (run / "finetune.yaml").write_text("of the run that trains\n")
    lock = RunLock(run)
    lock.acquire()
    words = ("finetune", models / "tiny", chats, "--output", run)
    code, err = said(*words, *QUICK)
    assert (code, f"{run} is in use: process {os.getpid()} on" in " ".join(err.split())) == (2, True), err
    assert (run / "finetune.yaml").read_text() == "of the run that trains\n"
    lock.release()
    assert said(*words, "--runner_config.train_steps=-1", *QUICK)[0] == 2
    require_unlocked(run)
    require_unlocked(tmp_path / "nothing")


def test_two_steps_of_lora_are_repeated_by_their_yaml_and_the_result_is_a_model(models, chats, tmp_path, said):
    first, again = tmp_path / "first", tmp_path / "again"
    words = ("finetune", models / "tiny", "--method", "lora", chats, "--output", first, "--runner_config.train_steps=2")
    code, err = said(*words, *QUICK)
    assert code == 0, err
    flat = " ".join(err.split())
    assert f"settings and reasons: {first}/finetune.yaml (repeat: mindllm finetune {first}/finetune.yaml)" in flat
    assert f"chat: mindllm chat {first}" in flat
    assert f"mindllm weights adapter {first}/checkpoint/llm-2 DIR" in flat
    code, err = said("finetune", "--config", first / "finetune.yaml", "--output", again)
    assert code == 0, err
    assert len(losses(first)) == 2
    assert losses(first) == losses(again)
    model = find_model(first)
    assert (model.directory, model.weights, model.tokenizer) == (
        models / "tiny",
        first / "checkpoint" / "llm-2",
        str(models / "tiny" / "tokenizer.json"),
    )
    code, err = said(*words, *QUICK)
    assert (code, "already has results (2 steps in metrics.jsonl and checkpoint llm-2)" in err) == (2, True)
    assert load_config(first / "finetune.yaml").output_dir == str(first)


def test_new_weights_of_a_network_are_trained_on_text(models, tmp_path, said):
    text = write_rows(tmp_path / "corpus.jsonl", ({"text": " ".join(WORDS * 9)} for _ in range(30)))
    output = tmp_path / "out"
    words = (
        "pretrain",
        "--like",
        models / "tiny",
        text,
        "--output",
        output,
        "--runner_config.train_steps=1",
        "--seq_length=64",
    )
    code, err = said(*words, *QUICK)
    assert code == 0, err
    assert f'generate: mindllm generate {output} --prompt "…"' in " ".join(err.split())
    model = find_model(output)
    assert model.architecture.num_layers == 2
    assert model.tokenizer == str(models / "tiny" / "tokenizer.json")
    assert model.keys()["hidden_size"] == 32


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("finetune",),
            "model or data are missing (arguments, not --model or --data); example: mindllm finetune DIR chats.jsonl",
        ),
        (("finetune", "MODELS/tiny"), "model or data are missing"),
        (("finetune", "MODELS/tny", "CHATS"), "no such directory; did you mean 'tiny'?"),
        (("finetune", "MODELS", "CHATS"), "is no model, but tiny in it is: name"),
        (("finetune", "MODELS/tiny", "nothing.jsonl"), "nothing.jsonl: no such file or directory"),
        (("finetune", "MODELS/tiny", "CHATS", "--method", "lorra"), "did you mean 'lora'"),
        (("finetune", "MODELS/tiny", "CHATS", "--method", "dpo"), "learns from pairs of answers"),
        (("finetune", "MODELS/tiny", "CHATS", "--epochs", "0"), "must be an integer of at least 1 (value 0)"),
        (("finetune", "MODELS/tiny", "CHATS", "--lora_rnk", "4"), "did you mean --lora-rank?"),
        (("finetune", "--config", "x.yaml", "--method", "lora"), "--method contradicts x.yaml; remove it"),
        (("finetune", "MODELS/tiny", "CHATS", "--run_mode", "train"), "contradicts mindllm finetune"),
        (("pretrain", "CHATS"), "network or text is missing; example: mindllm pretrain --like DIR corpus.jsonl"),
        (("pretrain", "--like", "llama3_8", "CHATS"), "did you mean 'llama3_8b'?"),
        (("pretrain", "--like", "MODELS/tiny", "CHATS"), "has no key 'text'"),
        (
            ("pretrain", "--like", "MODELS/tiny", "CHATS", "--tokenizer", "none.json"),
            "none.json: no such tokenizer file",
        ),
    ],
)
def test_a_mistake_is_told_in_a_line_and_nothing_is_written(words, text, models, chats, tmp_path, said):
    words = [word.replace("MODELS", str(models)).replace("CHATS", str(chats)) for word in words]
    output = tmp_path / "out"
    code, err = said(*words, *([] if "--config" in words or "0" in words or "lorra" in words else ["--output", output]))
    assert (code, text in " ".join(err.split())) == (2, True), err
    assert "Traceback" not in err
    assert not list(output.glob("*.yaml"))


def test_three_bad_rows_are_named_and_end_it_before_it_begins(models, tmp_path, said):
    rows = [*map(conversation, range(30)), "{bad", json.dumps({"instruction": "x"}), json.dumps([1])]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    code, err = said("finetune", models / "tiny", path, "--output", tmp_path / "out")
    assert code == 2
    assert "3 of 33 rows cannot be used" in err
    for line in (31, 32, 33):
        assert f"chats.jsonl:{line}: " in err
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_missing_is_told(models, chats, tmp_path, said):
    broken = save_tiny_chat_model(tmp_path / "broken", max_shard_size="20KB")
    next(broken.glob("model-00002*.safetensors")).unlink()
    code, err = said("finetune", broken, chats, "--output", tmp_path / "out", *QUICK)
    assert (code, "model-00002" in err) == (2, True), err


def test_a_disk_that_is_full_is_told_in_a_line(models, chats, tmp_path, said, monkeypatch):
    from mindllm.recipes import recipe

    def full(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(recipe, "atomic_open", full)
    code, err = said("finetune", models / "tiny", chats, "--output", tmp_path / "out")
    assert (code, err.splitlines()[-1].endswith("finetune.yaml: is not writable: No space left on device")) == (
        2,
        True,
    )


def test_the_resolved_run_is_printed_and_nothing_written(models, chats, tmp_path, capsys):
    assert (
        main(["finetune", str(models / "tiny"), str(chats), "--output", str(tmp_path / "out"), "--print_config"]) == 0
    )
    printed = capsys.readouterr().out
    assert "lora_rank: 8" in printed
    assert "  # " in printed.partition("lr_schedule:")[2].partition("runner_wrapper:")[0]  # why this rate
    assert not (tmp_path / "out").exists()
