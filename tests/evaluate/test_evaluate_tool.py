"""``mindllm evaluate`` as a user calls it."""

import json

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from tiny_model import write_model

from mindllm.cli.evaluate import main
from mindllm.errors import RunFailed, UserError
from mindllm.evaluate.answers import Answers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tool") / "model")


def test_an_interrupted_evaluation_goes_on_and_a_failed_task_leaves_the_others_scores(
    model, hub, tmp_path, monkeypatch, capsys
):
    asked = []
    put = Answers.put

    def interrupted(answers, kind, key, answer):
        put(answers, kind, key, answer)
        asked.append(key)
        if len(asked) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Answers, "put", interrupted)
    options = ["--model", str(model), "--tasks", "arc_easy,piqa", "--data", str(hub), "--output", str(tmp_path / "out")]
    with pytest.raises(KeyboardInterrupt):
        main([*options, "--json"])
    assert not (tmp_path / "out" / "results.json").exists()
    with pytest.raises(RunFailed, match="task piqa failed: the data set baber/piqa is not in "):
        main([*options, "--json", "--log_samples"])
    assert len(asked) == len(set(asked)) == 10
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found.pop("schema") == 1
    assert found == json.loads((tmp_path / "out" / "results.json").read_text())
    assert 0 <= found["tasks"]["arc_easy"]["acc"] <= 1
    assert set(found["failures"]) == {"piqa"}
    assert len((tmp_path / "out" / "samples_arc_easy.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "arc_eazy"], "arc_eazy: no such task"),
        (
            ["--tasks", "arc_easy", "--tokenizer", "nowhere.json"],
            r"the tokenizer is missing \(nowhere.json does not exist\)",
        ),
        (["--tasks", "arc_easy", "--include_path", "nowhere"], "include_path nowhere: no such directory"),
    ],
)
def test_mistakes_are_told_before_a_model_is_built(options, message, model, tmp_path, monkeypatch):
    monkeypatch.setattr("mindllm.evaluate.run.all_tasks", lambda options: SmallList())
    with pytest.raises(UserError, match=message):
        main(["--model", str(model), "--output", str(tmp_path), *options])


class SmallList:
    """Stands for the harness's fourteen thousand files."""

    task_index = all_tasks = ("arc_easy",)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--limit=0", "must be an integer of at least 1 (value 0)"),
        ("--gen_kwargs=x", "write name=value"),
        ("--tasks=,", "the list of tasks is empty"),
    ],
)
def test_options_that_mean_nothing_are_refused(option, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tmp_path), "--tasks", "arc_easy", option])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
