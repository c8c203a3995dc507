"""Answers that are desirable or not: their forms, the answers of others, pairs as two rows, and rows that are none."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chats import CHATML, chat_tokenizer

from mindllm.data.chat.pairs import AnswerRows, HeldOutPairs, answer_in
from mindllm.errors import UserError

ASKED = {"role": "user", "content": "two?"}
SAID = {"role": "assistant", "content": "2"}
FORMS = {
    "strings": {"prompt": "two?", "completion": "2", "label": True},
    "messages": {"prompt": [ASKED], "completion": [SAID], "label": True},
    "ms-swift": {"messages": [ASKED, SAID], "label": True},
    "sharegpt": {"conversations": [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "2"}], "kto_tag": True},
    "alpaca": {"instruction": "two?", "input": "", "output": "2", "kto_tag": True},
    "of a table": {"prompt": "two?", "completion": "2", "label": "True"},
    "the chosen one of a pair": {"prompt": "two?", "chosen": "2", "rejected": "3"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form):
    answer = answer_in(FORMS[form], "row 1")
    assert (answer.asked, answer.answer, answer.desirable) == ((ASKED,), (SAID,), True)


def test_a_label_says_that_an_answer_is_not_desirable():
    assert not answer_in(FORMS["strings"] | {"label": False}, "row 1").desirable
    assert not answer_in(FORMS["alpaca"] | {"kto_tag": 0}, "row 1").desirable
    rejected = answer_in(FORMS["the chosen one of a pair"], "row 1", side=1)
    assert (rejected.answer[0]["content"], rejected.desirable) == ("3", False)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b"}, "no label (keys: prompt, completion)"),
        ({"prompt": "a", "completion": "b", "label": "perhaps"}, "label is 'perhaps'; write true or false"),
        ({"prompt": "a", "completion": "b", "label": None}, "label is None"),
        ({"completion": "b", "label": True}, "begins with an answer; give the question in prompt"),
        ({"prompt": "a", "completion": [ASKED], "label": True}, "ends with the user, not with an answer"),
        ({"messages": [ASKED], "label": True}, "ends with the user"),
        ({"prompt": "a", "completion": 1, "label": True}, "not a row for unpaired answers"),
        ({"text": "a", "label": True}, "of no known form"),
    ],
)
def test_rows_that_are_no_answers(row, words):
    with pytest.raises(UserError) as refused:
        answer_in(row, "answers.jsonl, line 3")
    assert str(refused.value).startswith("answers.jsonl, line 3: ")
    assert words in str(refused.value)


@pytest.fixture
def answers_of(tmp_path):
    """Answers of rows, with a sequence length."""

    def make(rows, seq_length=96, **options):
        path = tmp_path / "answers.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return AnswerRows([str(path)], chat_tokenizer(tmp_path / "model", CHATML), seq_length, **options)

    return make


def text_of(sample, tokenizer, other):
    """The words of one document that have labels."""
    side = (sample["segment_starts"] > 0) == other
    return tokenizer.decode(sample["labels"][side & (sample["labels"] >= 0)].tolist())


def answer(number, label=True):
    return {"prompt": f"{number}?", "completion": f"It is {number}.", "label": label}


def test_a_sample_has_its_own_answer_and_that_of_the_row_before(answers_of):
    rows = answers_of([answer(1), answer(2, False), answer(3)])
    samples = rows.samples([0, 1, 2])
    own, others = ([text_of(sample, rows.tokenizer, other) for sample in samples] for other in (False, True))
    assert [text.split("<")[0].strip() for text in own] == ["It is 1.", "It is 2.", "It is 3."]
    assert [text.split("<")[0].strip() for text in others] == ["It is 3.", "It is 1.", "It is 2."]
    assert all("2?" in rows.tokenizer.decode(samples[1]["input_ids"][samples[1]["segment_starts"] == start].tolist())
               for start in np.unique(samples[1]["segment_starts"])[:2])  # fmt: skip
    assert [sample["loss_mask"][:2].tolist() for sample in samples] == [[1, 0], [0, 1], [1, 0]]
    assert all(sample["loss_mask"].sum() == 1 for sample in samples)


def test_pairs_are_two_rows_each_beside_the_same_side_of_another(answers_of):
    pairs = [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": f"Not {n}."} for n in (1, 2)]
    rows = answers_of(pairs)
    assert len(rows) == 4
    samples = rows.samples(range(4))
    said = [
        [text_of(sample, rows.tokenizer, other).split("<")[0].strip() for other in (False, True)] for sample in samples
    ]
    assert said == [["It is 1.", "It is 2."], ["Not 1.", "Not 2."], ["It is 2.", "It is 1."], ["Not 2.", "Not 1."]]
    assert [sample["loss_mask"][0] for sample in samples] == [1, 0, 1, 0]
    counts = rows.count(range(4))
    assert (counts.answers, counts.desirable, counts.truncated) == (4, 2, 0)
    assert counts.describe(96).startswith("4 answers, 2 of them desirable; ")


def test_a_row_that_cannot_be_used_lends_no_answer(answers_of):
    rows = answers_of([answer(1), {"prompt": "?", "label": True}, answer(3)])
    assert rows.fault(1)
    assert "It is 1." in text_of(rows.samples([2])[0], rows.tokenizer, True)


def test_an_answer_alone_has_no_other_document(answers_of):
    rows = answers_of([answer(1), answer(2)], alone=True)
    sample = rows.samples([1])[0]
    assert not text_of(sample, rows.tokenizer, True)
    assert "It is 2." in text_of(sample, rows.tokenizer, False)


def test_one_row_has_no_other_answer(answers_of):
    with pytest.raises(UserError, match=r"answers\.jsonl:1: is the only row"):
        answers_of([answer(1)])
    assert len(answers_of([answer(1)], alone=True)) == 1


def test_rows_of_two_kinds_are_told(answers_of):
    rows = answers_of([answer(1), {"prompt": "?", "chosen": "a", "rejected": "b"}])
    assert "all rows are pairs or none is, and the first is no pair" in rows.fault(1)


def test_an_answer_of_which_nothing_is_left_is_a_bad_row(answers_of):
    rows = answers_of([answer("long " * 20), answer(2)], seq_length=24)
    assert "nothing of the answer is left" in rows.fault(0)


def test_behind_the_last_held_out_row_is_padding(answers_of):
    held_out = HeldOutPairs(answers_of([answer(1), answer(2, False)]), [1], 96)
    assert held_out.sample_count == 1
    assert held_out.sample(0)["loss_mask"].sum() == 1
    assert held_out.sample(1)["loss_mask"].sum() == 0
