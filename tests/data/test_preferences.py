"""Pairs of answers: their forms, what of them is learnt, what is cut, and rows that are none."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chats import CHATML, chat_tokenizer

from mindllm.data.chat.pairs import HeldOutPairs, PairRows, pair_of, pair_sample, shared_out
from mindllm.data.mind_record import IGNORED
from mindllm.data.rows import Row
from mindllm.errors import UserError

ASKED = {"role": "user", "content": "two?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("2", "3"))
FORMS = {
    "strings": {"prompt": "two?", "chosen": "2", "rejected": "3"},
    "messages": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "whole conversations": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "whole conversations and a prompt": {"prompt": "two?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "two?"}],
        "chosen": {"from": "gpt", "value": "2"},
        "rejected": {"from": "gpt", "value": "3"},
    },
    "alpaca": {"instruction": "two?", "input": "", "chosen": "2", "rejected": "3"},
    "ms-swift": {"messages": [ASKED, GOOD], "rejected_response": "3"},
    "query and response": {"query": "two?", "response": "2", "rejected_response": "3"},
    "question": {"question": "two?", "chosen": "2", "rejected": "3"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form):
    pair = pair_of(FORMS[form], "row 1")
    assert pair.chosen.messages == (ASKED, GOOD)
    assert pair.rejected.messages == (ASKED, BAD)
    assert pair.shared == 0


@pytest.mark.parametrize("form", ["strings", "alpaca", "query and response", "question"])
def test_earlier_turns_are_said_before_both_answers(form):
    pair = pair_of({**FORMS[form], "history": [["one?", "1"]], "system": "count"}, "row 1")
    before = [("system", "count"), ("user", "one?"), ("assistant", "1"), ("user", "two?")]
    for answered in (pair.chosen, pair.rejected):
        assert [(message["role"], message["content"]) for message in answered.messages[:-1]] == before


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x.png"]}, "images: only text can be learnt"),
        ({"prompt": "a", "chosen": "b"}, "no pair of answers (keys: prompt, chosen)"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": "b", "rejected": "c"}, "chosen begins with an answer; give the question in prompt"),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, "not a row for pairs of answers"),
        ({"prompt": "a", "chosen": [ASKED], "rejected": "c"}, "chosen has no separate answer"),
        ({"messages": [ASKED], "rejected_response": "c"}, "messages end with the user"),
        ({"prompt": [{"from": "cat", "value": "?"}], "chosen": "a", "rejected": "b"}, "unknown speaker 'cat'"),
    ],
)
def test_rows_that_are_no_pairs(row, words):
    with pytest.raises(UserError) as refused:
        pair_of(row, "pairs.jsonl, line 3")
    assert str(refused.value).startswith("pairs.jsonl, line 3: ")
    assert words in str(refused.value)


@pytest.fixture
def pairs_of(tmp_path):
    """Pairs of rows, with a sequence length."""

    def make(rows, seq_length):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PairRows([str(path)], chat_tokenizer(tmp_path / "model", CHATML), seq_length)

    return make


def learnt(sample, rejected, tokenizer):
    """The words of one side that have labels."""
    side = (sample["segment_starts"] > 0) == rejected
    return tokenizer.decode(sample["labels"][side & (sample["labels"] >= 0)].tolist())


def test_a_sample_has_both_answers_and_learns_nothing_but_their_words(pairs_of):
    history = [ASKED, {"role": "assistant", "content": "What about it?"}, ASKED]
    pairs = pairs_of([{"prompt": history, "chosen": "It is 2.", "rejected": "No."}], 128)
    sample = pair_sample(pairs.rows([0]), 128)
    assert learnt(sample, False, pairs.tokenizer).startswith("It is 2.")
    assert learnt(sample, True, pairs.tokenizer).startswith("No.")
    assert "What about" not in learnt(sample, False, pairs.tokenizer)
    assert sample["loss_mask"].sum() == 1
    chosen, rejected = pairs.whole_rows(0)
    assert sample["position_ids"][chosen.places] == 0
    tokens = sample["input_ids"][chosen.places : chosen.places + rejected.places]
    assert tokens.tolist() == rejected.tokens[:-1].tolist()


def test_rows_beyond_the_end_are_padding_without_a_loss(pairs_of):
    pairs = pairs_of([FORMS["strings"]], 64)
    held_out = HeldOutPairs(pairs, [0], 64)
    assert held_out.sample(0)["loss_mask"].sum() == 1
    padding = held_out.sample(1)
    assert padding["loss_mask"].sum() == 0
    assert (padding["labels"] == IGNORED).all()


@pytest.mark.parametrize(
    ("places", "room", "kept"),
    [((3, 4), 8, [3, 4]), ((9, 2), 8, [6, 2]), ((2, 9), 8, [2, 6]), ((9, 9), 8, [4, 4]), ((9, 9), 7, [4, 3])],
)
def test_a_long_answer_leaves_the_other_its_half(places, room, kept):
    assert shared_out(places, room) == kept


def test_what_is_cut_is_counted_and_told_once(pairs_of, caplog):
    pairs = pairs_of([FORMS["strings"], {**FORMS["strings"], "chosen": "2 " * 300}], 48)
    rows = pairs.rows([0, 1, 1])
    assert [sum(row.places for row in rows[at : at + 2]) for at in (0, 2)] == [
        sum(row.places for row in pairs.whole_rows(0)),
        48,
    ]
    assert caplog.text.count("ends are cut") == 1
    counts = pairs.count([0, 1])
    assert (counts.pairs, counts.truncated) == (2, 1)
    assert "1 pairs are longer" in counts.describe(48)


def test_an_answer_that_is_cut_away_altogether_is_a_fault(pairs_of):
    rows = [{"prompt": "two? " * 40, "chosen": "2", "rejected": "3"}, FORMS["strings"]]
    wide, narrow = pairs_of(rows, 4096), pairs_of(rows, 128)
    assert [wide.fault(0), narrow.fault(1)] == ["", ""]
    needed = sum(row.places for row in narrow.whole_rows(0))
    said = narrow.fault(0)
    assert "nothing of the chosen answer is left of " in said
    assert f"in a row of 128; raise model.model_config.seq_length to {needed}" in said
    assert pairs_of(rows, needed).fault(0) == ""


def test_samples_are_no_longer_than_their_rows():
    row = Row(np.arange(5, dtype=np.int32), np.ones(5, bool))
    assert pair_sample([row, row], 8)["segment_starts"].tolist() == [0] * 4 + [4] * 4
