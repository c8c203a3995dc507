"""The benchmark of evaluation asks both sides the same questions and writes what it measured."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from mindllm.errors import RunFailed, UserError
from toolkit.benchmark import evaluate
from toolkit.benchmark.evaluate_data import SUBJECT, TASKS, write_questions

sys.path.append(str(Path(__file__).resolve().parents[1] / "evaluate"))


def test_questions_are_the_same_at_every_run_and_their_answers_true(tmp_path):
    for name in ("one", "two"):
        write_questions(tmp_path / name, 20)
    files = [sorted((tmp_path / name).rglob("*.jsonl")) for name in ("one", "two")]
    assert [path.read_text() for path in files[0]] == [path.read_text() for path in files[1]]
    rows = (tmp_path / "one/cais/mmlu" / SUBJECT / "test.jsonl").read_text().splitlines()
    assert len(rows) == 20
    for row in map(json.loads, rows):
        name = row["question"].removeprefix("Which module defines ").removesuffix("?")
        module = row["choices"][row["answer"]]
        assert getattr(__import__(module, fromlist=["_"]), name).__module__ == module


def test_sides_that_disagree_are_no_result(monkeypatch):
    class Side:
        def __init__(self, module, name, sizes, directory):
            self.name = name

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731

        def ask(self):
            return {"seconds": 1.0, "processor": 1.0, "scores": {"acc": 0.5 + (self.name == "hf")}}

    monkeypatch.setattr(evaluate, "Side", Side)
    with pytest.raises(RunFailed, match="different scores"):
        evaluate.measure({"task": "gsm8k"}, 1)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(UserError, match="no Hugging Face directory"):
        evaluate.main(["--model", str(tmp_path)])
    with pytest.raises(UserError, match="at least 1"):
        evaluate.main(["--model", str(tmp_path), "--rounds=0"])


@pytest.mark.slow
def test_both_sides_find_the_same_scores(tmp_path):
    pytest.importorskip("transformers")
    from tiny_model import write_model

    model, page, file = write_model(tmp_path / "model"), tmp_path / "page.md", tmp_path / "rounds.json"
    small = ["--questions=4", "--shots=1", "--new=4", "--rounds=2", "--threads=1"]
    assert evaluate.main(["--model", str(model), *small, f"--json={file}", f"--markdown={page}"]) == 0
    results = json.loads(file.read_text())
    assert [result["task"] for result in results] == list(TASKS)
    assert all(len(result["ratio"]) == len(result["processor_ratio"]) == 2 for result in results)
    assert page.read_text().count("\n| ") == 2 + len(TASKS)
