"""Every task that people report on, and our own: loaded from local data alone, and every question scored."""

import pytest

pytest.importorskip("lm_eval")

from every_task_hub import NAMED, OWN, write_agieval, write_every_dataset
from knowing_model import Knows

from mindllm.config.generation import EvaluationConfig
from mindllm.evaluate.local_data import local_data
from mindllm.evaluate.run import evaluate_tasks
from mindllm.evaluate.tasks import first_line

GROUPS = {"mmlu": 57, "ceval-valid": 52, "agieval_en": 10, "bbh": 27}
SHARES = {"mmlu": 1 / 3, "ceval-valid": 1 / 3, "boolq": 0.5, "arc_challenge": 1.0, "modellink_boolq": 0.5}
TASKS = [pytest.param(name, marks=pytest.mark.slow) for name in (*NAMED, *OWN)]
"""Slow: some hundred data sets are prepared."""


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return write_every_dataset(tmp_path_factory.mktemp("everything"))


def ask(name, data):
    """The outcome of a model that holds every B, every x and every Yes for right, and writes B."""
    model = Knows(lambda context, choice: float(choice.strip() in ("B", "x", "yes", "Yes")), lambda *_: " B")
    return evaluate_tasks(model, [name], EvaluationConfig(data=str(data), confirm_run_unsafe_code=True))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_loaded_and_scored(name, everything):
    outcome = ask(name, everything)
    assert outcome.failures == {}
    assert name in outcome.scores()
    assert len(outcome.samples) == GROUPS.get(name, 1)
    if name in SHARES:
        assert outcome.scores()[name]["acc"] == pytest.approx(SHARES[name])


def test_questions_of_agieval_stand_after_the_first_three_of_their_subject(tmp_path, monkeypatch):
    monkeypatch.setattr(first_line, "AGIEVAL_SUBJECTS", ("math", "sat-math"))
    for subject in first_line.AGIEVAL_SUBJECTS:
        write_agieval(tmp_path / "hails" / f"agieval-{subject}", subject)
    with local_data(tmp_path):
        docs = list(first_line.agieval_with_examples()["test"])
    assert [doc["label"] for doc in docs] == ["3", "4", "D", "A"]
    assert docs[0]["examples"].endswith("Q: 2? A: The answer is 2")
    assert docs[3]["examples"].count("Among A through D, the answer is") == 3
    assert "sat-math 2" in docs[3]["examples"]


def test_the_subject_of_agieval_that_is_missing_is_named(tmp_path):
    outcome = ask("modellink_agieval", tmp_path)
    assert (
        f"hails/agieval-aqua-rat is not in {tmp_path}/hails/agieval-aqua-rat" in outcome.failures["modellink_agieval"]
    )


@pytest.mark.parametrize(
    ("text", "right"), [(" B", 1), ("(B)\nor not", 1), ("$B$", 1), ("\nB", 1), ("B.", 0), ("A\nB", 0), ("", 0)]
)
def test_the_first_line_of_agieval(text, right):
    assert first_line.agieval_results({"label": "B"}, [text]) == {"acc": right}


def test_labels_of_agieval():
    assert first_line.agieval_label({"gold": [1]}) == "B"
    assert first_line.agieval_label({"gold": [0, 2]}) == "A,C"
    assert first_line.agieval_label({"answer": "$\\frac{1}{2}$"}) == "\\frac{1}{2}"


@pytest.mark.parametrize(("text", "right"), [(" (A)\n\nQ: next", 1), ("(A)", 1), ("A", 0), ("(A) so", 0), ("", 0)])
def test_the_first_line_of_bbh(text, right):
    assert first_line.bbh_results({"target": "(A)"}, [text]) == {"acc": right}
