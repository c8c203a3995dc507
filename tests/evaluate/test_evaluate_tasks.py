"""Tasks, asked of a model that knows all answers or none: scores, failures that are named, files."""

import json
import re

import pytest

pytest.importorskip("lm_eval")

from knowing_model import Knows

from mindllm.config.generation import EvaluationConfig
from mindllm.errors import UserError
from mindllm.evaluate.report import as_json, is_wrong, render_page, table, write_results
from mindllm.evaluate.run import Outcome, evaluate_tasks, find_tasks


@pytest.fixture
def options(hub):
    return EvaluationConfig(data=str(hub))


def always(word):
    return lambda context, choice: 1.0 if choice.strip() == word else 0.0


def test_yes_and_no_of_boolq(options):
    outcome = evaluate_tasks(Knows(always("Yes")), ["modellink_boolq"], options)
    assert outcome.scores() == {"modellink_boolq": {"acc": 0.4}}  # two of five are true
    tie = evaluate_tasks(Knows(), ["modellink_boolq"], options)
    assert tie.scores() == {"modellink_boolq": {"acc": 0.4}}


def test_solutions_of_gsm8k_are_read_from_what_is_written(options):
    seen = []

    def writes(context, wishes):
        seen.append(context)
        return "Easy.\nThe answer is 3."

    outcome = evaluate_tasks(Knows(writes=writes), ["modellink_gsm8k"], options)
    assert outcome.scores() == {"modellink_gsm8k": {"acc": 0.2}}
    assert seen[0].count("The answer is") == 3


def test_programs_run_where_it_was_confirmed_and_nowhere_else(options):
    model = Knows(writes=lambda context, wishes: "    return a + b\n")
    refused = evaluate_tasks(model, ["humaneval", "modellink_boolq"], options)
    assert "--confirm_run_unsafe_code" in refused.failures["humaneval"]
    assert set(refused.scores()) == {"modellink_boolq"}
    confirmed = options.model_copy(update={"confirm_run_unsafe_code": True})
    wishes = []
    model.writes = lambda context, asked: wishes.append(asked) or "    return a + b\n"
    outcome = evaluate_tasks(model, ["humaneval", "modellink_humaneval"], confirmed)
    assert outcome.scores()["humaneval"] == {"pass@1,create_test": 1.0}
    assert outcome.scores()["modellink_humaneval"] == {"pass@1,create_test": 1.0}
    assert wishes[1]["num_beams"] == 4
    assert wishes[1]["length_penalty"] == 0.7
    wrong = evaluate_tasks(Knows(writes=lambda *_: "    return a - b\n"), ["humaneval"], confirmed)
    assert wrong.scores()["humaneval"] == {"pass@1,create_test": 0.0}


def test_a_failed_task_is_named_and_the_others_are_kept(options):
    outcome = evaluate_tasks(Knows(always("Yes")), ["arc_challenge", "piqa", "modellink_boolq"], options)
    assert set(outcome.scores()) == {"modellink_boolq"}
    assert "ARC-Challenge" in outcome.failures["arc_challenge"]
    assert f"{options.data}/baber/piqa" in outcome.failures["piqa"]
    assert "hf download" in outcome.failures["piqa"]


def test_an_unknown_task_is_told_with_the_nearest(options, monkeypatch):
    monkeypatch.setattr("mindllm.evaluate.run.all_tasks", lambda options: find_tasks(["arc_easy"], options))
    with pytest.raises(UserError, match="arc_eazy: no such task; did you mean 'arc_easy'"):
        find_tasks(["arc_eazy"], options)


def test_table_json_samples_and_the_page_of_wrong_answers(options, tmp_path):
    outcome = evaluate_tasks(Knows(always("Yes")), ["modellink_boolq"], options)
    outcome.failures["other"] = "<b>broken</b>"
    assert "|modellink_boolq|" in table(outcome).replace(" ", "")
    found = as_json(outcome, "some/model")
    assert json.loads(json.dumps(found, allow_nan=False))["tasks"] == {"modellink_boolq": {"acc": 0.4}}
    write_results(outcome, "some/model", tmp_path, samples=True)
    lines = (tmp_path / "samples_modellink_boolq.jsonl").read_text().splitlines()
    assert [json.loads(line)["doc"]["idx"] for line in lines] == list(range(5))
    assert json.loads((tmp_path / "results.json").read_text())["failures"] == {"other": "<b>broken</b>"}

    outcome.samples["modellink_boolq"][0]["arguments"][0] = ("<script>1</script>", " Yes")
    page = render_page(outcome, "some/model")
    assert "3 of 5 answers are wrong" in page
    assert page.count("<details>") == 3
    assert "<script>" not in page
    assert "<b>broken</b>" not in page


@pytest.mark.parametrize(("target", "right"), [(1, ["2"]), ("1", ["1"]), ([0, 2], ["1", "0"]), (" 0", ["0"])])
def test_the_page_marks_what_was_right_by_its_place_or_its_text(target, right):
    choices = ["1", "2", "0"]
    sample = {
        "doc_id": 7,
        "target": target,
        "arguments": [("Example?\n\nWhich?", choice) for choice in choices],
        "filtered_resps": [(-3.0, False), (-2.0, False), (-1.0, False)],
        "metrics": ["acc"],
        "acc": 0.0,
    }
    page = render_page(Outcome(samples={"task": [sample]}), "some/model")
    assert re.findall(r'<tr class="right"><td>(.*?)</td>', page) == right
    assert "<b>7</b> …Which?</summary>" in page


def test_which_answers_are_wrong():
    assert is_wrong({"metrics": ["acc"], "acc": 0.0})
    assert not is_wrong({"metrics": ["acc"], "acc": 1.0})
    assert is_wrong({"metrics": ["word_perplexity"], "word_perplexity": (1.0, 2)}) is None


def test_all_subjects_of_mmlu_are_one_task_with_examples_of_the_subject(tmp_path):
    from tiny_hub import write_dataset

    rows = [
        {"question": f"{subject}{n}", "subject": subject, "choices": ["w", "x", "y", "z"], "answer": n % 4}
        for subject in ("law", "logic")
        for n in range(6)
    ]
    write_dataset(tmp_path / "cais/mmlu", ("all", {"dev": rows, "test": rows, "validation": rows}))
    asked = []

    def writes(context, wishes):
        asked.append(context)
        return " B"

    outcome = evaluate_tasks(Knows(writes=writes), ["modellink_mmlu"], EvaluationConfig(data=str(tmp_path)))
    assert outcome.failures == {}
    assert outcome.scores() == {"modellink_mmlu": {"acc": pytest.approx(4 / 12)}}
    assert asked[0].count("Answer:") == 6
    assert "law0" in asked[0]
    assert "logic" not in asked[0]
