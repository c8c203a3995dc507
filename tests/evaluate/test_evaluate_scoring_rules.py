"""How answers that the model writes are judged."""

import pytest

pytest.importorskip("lm_eval")

from mindllm.evaluate.tasks import scoring

MMLU = {"question": "2+2?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "some_maths", "examples": "HEAD"}
GSM8K = {"question": "How many?", "answer": "She has 3+4=<<3+4=7>>7 at first.\n#### 1,007"}


@pytest.mark.parametrize(
    ("text", "right"), [("B. 4", 1), ("B", 1), (" B", 1), ("it is B. ok", 1), ("A. 3", 0), ("4", 0), ("C", 0), ("", 0)]
)
def test_the_letter_of_mmlu(text, right):
    assert scoring.mmlu_results(MMLU, [text]) == {"acc": right}


def test_a_question_of_mmlu_stands_after_its_examples():
    assert scoring.mmlu_prompt(MMLU) == "HEAD\n\n2+2?\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer:"


@pytest.mark.parametrize(
    ("text", "right"),
    [("so\nThe answer is 1007.", 1), ("The answer is $1,007.", 1), ("The answer is 7.", 0), ("1007", 0)],
)
def test_the_number_of_gsm8k(text, right):
    assert scoring.gsm8k_results(GSM8K, [text]) == {"acc": right}


def test_a_solved_example_of_gsm8k_is_an_answer_that_is_right():
    target = scoring.gsm8k_target(GSM8K)
    assert target == "She has 3+4=7 at first.\nThe answer is 1,007."
    assert scoring.gsm8k_results(GSM8K, [target]) == {"acc": 1.0}


def test_a_program_is_the_problem_and_what_was_written_for_it():
    doc = {"prompt": "def f():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "f"}
    programs = scoring.whole_programs([["    return 1\n```\nhello", "    return 2"]], [doc])[0]
    assert programs == ["def f():\n    return 1\n", "def f():\n    return 2"]
    assert scoring.pass_at_1(doc, [programs]) == {"pass@1": 0.5}
