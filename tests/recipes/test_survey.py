"""Files of conversations and pairs are looked at before a run is chosen: form, bad rows, lengths."""

import json

import pytest
from tiny_chat import WORDS, conversation, pair, write_rows

from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.errors import UserError
from mindllm.recipes import survey as module
from mindllm.recipes.survey import CONVERSATIONS, PAIRS, survey

MESSAGES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
BELLE = {"instruction": "Human: a\nAssistant:", "output": "b"}
MOSS = {"chat": {"turn_1": {"Human": "<|Human|>: a<eoh>", "MOSS": "<|MOSS|>: b<eom>"}}}
CODE = {"code_with_problem": "a ```x```", "code_only": "b", "explanation_only": "c"}
BAD = ("{not json", json.dumps({"instruction": "x"}), json.dumps({"question": "x"}))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(train_byte_level_bpe(WORDS * 4, 300, at_most=True), path)
    return path


def refused(tokenizer, path, **options):
    with pytest.raises(UserError) as error:
        survey([path], tokenizer, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("row", "loader", "handler"),
    [
        (conversation(1), CONVERSATIONS, "auto"),
        (MESSAGES, CONVERSATIONS, "auto"),
        (SHAREGPT, CONVERSATIONS, "auto"),
        (BELLE, CONVERSATIONS, "BelleMultiTurnInstructionHandler"),
        (MOSS, CONVERSATIONS, "MOSSMultiTurnHandler"),
        (CODE, CONVERSATIONS, "LeetcodePythonInstructionHandler"),
        ({"content": "a", "summary": "b"}, CONVERSATIONS, "ADGenInstructionHandler"),
        ({"prompt": "a", "completion": "b"}, CONVERSATIONS, "auto"),
        ({"query": "a", "response": "b"}, CONVERSATIONS, "auto"),
        ({"query": "a", "response": "b", "rejected_response": "c"}, PAIRS, ""),
        (pair(1), PAIRS, ""),
        ({**MESSAGES, "rejected_response": "c"}, PAIRS, ""),
        ({**SHAREGPT, "chosen": "b", "rejected": "c"}, PAIRS, ""),
    ],
)
def test_the_form_is_told_by_the_first_rows(row, loader, handler, tokenizer, tmp_path):
    found = survey([write_rows(tmp_path / "rows.jsonl", [row] * 3)], tokenizer)
    assert (found.loader, found.handler, found.rows, found.bad) == (loader, handler, 3, 0)
    assert len(found.lengths) == 3
    assert found.lengths.min() > 0


LABELLED = {"prompt": "say", "completion": "yes", "label": True}


@pytest.mark.parametrize("row", [LABELLED, {**MESSAGES, "kto_tag": False}])
def test_answers_with_a_label_are_told_by_their_keys(row, tokenizer, tmp_path):
    found = survey([write_rows(tmp_path / "rows.jsonl", [row] * 3)], tokenizer)
    assert (found.loader, found.handler, found.rows, found.labelled) == (PAIRS, "", 3, True)


def test_a_label_beside_a_conversation_is_about_its_answer_where_that_is_asked_for(tokenizer, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{**MESSAGES, "label": True}] * 3)
    assert survey([path], tokenizer).loader == CONVERSATIONS
    assert survey([path], tokenizer, unpaired=True).labelled


def test_pairs_whose_answers_are_learnt_from_one_by_one_are_two_rows_each(tokenizer, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", map(pair, range(3)))
    found = survey([path], tokenizer, unpaired=True)
    assert (found.loader, found.rows, found.labelled) == (PAIRS, 6, False)
    assert len(found.lengths) == 6


def test_other_files_and_directories_are_read(tokenizer, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([conversation(1), conversation(2)]))
    (tmp_path / "b.csv").write_text("instruction,output\nsay,yes\n")
    write_rows(tmp_path / "c.jsonl", [conversation(3)])
    assert survey([tmp_path], tokenizer).rows == 4
    assert survey([tmp_path / "a.json", tmp_path / "c.jsonl"], tokenizer).rows == 3


def test_bad_rows_are_named_by_file_and_line_with_what_to_do(tokenizer, tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", [conversation(1), BAD[0], *map(conversation, range(3)), BAD[1], BAD[2]])
    lines = refused(tokenizer, path).splitlines()
    assert lines[:2] == ["3 of 7 rows cannot be used:", "mend them, or leave them out with --skip_bad_rows"]
    assert [line.strip().partition(": ")[0] for line in lines[2:]] == [f"{path}:{line}" for line in (2, 6, 7)]
    assert "not a line of JSON" in lines[2]
    assert "of no known form (keys: instruction)" in lines[3]
    found = survey([path], tokenizer, skip_bad_rows=True)
    assert (found.rows, found.bad) == (4, 3)


def test_of_many_bad_rows_some_are_named(tokenizer, tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", [*map(conversation, range(30)), *[BAD[0]] * 9])
    lines = refused(tokenizer, path).splitlines()
    assert lines[0].startswith("9 of 39 rows")
    assert (len(lines), lines[-1].strip()) == (8, "and 4 more")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", "", "holds no rows; write a conversation in each line"),
        ("rows.jsonl", "{bad\n{bad\n", "holds no row that can be read; "),
        (
            "rows.jsonl",
            '{"instruction": "你好"}'.encode("gb18030"),
            "rows.jsonl:1: not a line of JSON (not UTF-8: byte 0xc4",
        ),
        ("rows.jsonl", '{"instruction": "x"}'.encode("utf-16"), "save it as UTF-8"),
        (
            "rows.csv",
            "instruction,output\n什么,是\n".encode("gb18030"),
            "rows.csv: not UTF-8 (byte 0xca); save it as UTF-8",
        ),
        ("rows.csv", "instruction;output\na;b\n", "rows.csv:1: its columns are separated by ';'"),
        ("rows.jsonl", '{"text": "a"}\n', "rows of no known form (keys: text); write messages, conversations"),
        ("rows.jsonl", '{"text": "a"}\n', "running text is learnt by mindllm pretrain --like DIR FILE"),
        ("rows.txt", "some text", "running text is learnt by mindllm pretrain --like DIR FILE"),
        ("rows.xlsx", "x", "not a file of conversations; write .jsonl or .json"),
        ("none.jsonl", None, "no such file or directory"),
        ("rows.parquet", "x", "damaged, or not what its name says"),
    ],
)
def test_what_is_no_file_of_conversations_is_told(name, content, said, tokenizer, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in refused(tokenizer, path)


def test_an_empty_directory_is_told(tokenizer, tmp_path):
    assert "no files of records in this directory" in refused(tokenizer, tmp_path)


def test_quantiles_of_many_rows_are_those_of_an_even_sample(tokenizer, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", [conversation(7, words) for words in range(1, 101)])
    whole = survey([path], tokenizer)
    monkeypatch.setattr(module, "MEASURED", 20)
    part = survey([path], tokenizer)
    assert (whole.sampled, part.sampled, len(part.lengths)) == (False, True, 20)
    assert part.length_at(1.0) == whole.length_at(1.0)  # the first and the last row are in it
    assert part.length_at(0.5) == pytest.approx(whole.length_at(0.5), rel=0.1)
    shorter = whole.length_at(0.9)
    assert whole.longer_than(shorter) == 10
    assert part.longer_than(shorter) == pytest.approx(10, abs=4)
    assert whole.mean(shorter) < whole.mean(1 << 30)


def test_rows_behind_the_bound_count_as_good(tokenizer, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", [*map(conversation, range(10)), BAD[0]])
    monkeypatch.setattr(module, "CHECKED", 10)
    assert survey([path], tokenizer).rows == 11
