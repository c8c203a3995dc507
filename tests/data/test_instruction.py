"""Conversations: every form of row, the loss on the assistant's words alone, special tokens nobody can say, truncation."""

import gzip
import json

import numpy as np
import pytest
from chats import CHATML, CHATML_MARKED, FORGETFUL, INST, chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from mindllm.data.chat.conversations import Conversation, read_conversation
from mindllm.data.chat.instruction import InstructionRows, encode_chat, trained_tokens
from mindllm.data.chat.template import ChatTemplate
from mindllm.errors import UserError

CHAT = [
    {"role": "user", "content": "What is 2 plus 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thank you."},
    {"role": "assistant", "content": "été"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("chats")


def rows_of(directory, records, template=None, seq_length=200, name="rows.jsonl", **options):
    tokenizer = chat_tokenizer(directory / str(abs(hash(template))), template)
    path = directory / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return InstructionRows([str(path)], tokenizer, seq_length, **options)


def trained_text(rows, number=0):
    """The trained tokens of a row as text, and the rest as text."""
    row = rows.whole_row(number)
    decode = rows.tokenizer.decode
    return decode(row.tokens[row.trained].tolist()), decode(row.tokens[~row.trained].tolist())


@pytest.mark.parametrize(
    ("template", "trained", "rest"),
    [
        (
            CHATML,
            "It is 4.<|im_end|>\nété<|im_end|>\n",
            "<|im_start|>user\nWhat is 2 plus 2?<|im_end|>\n<|im_start|>assistant\n"
            "<|im_start|>user\nThank you.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            CHATML_MARKED,
            "It is 4.<|im_end|>été<|im_end|>",
            "<|im_start|>user\nWhat is 2 plus 2?<|im_end|>\n<|im_start|>assistant\n\n"
            "<|im_start|>user\nThank you.<|im_end|>\n<|im_start|>assistant\n\n",
        ),
        (
            INST,
            " It is 4.<|endoftext|> été<|endoftext|>",
            "<s>[INST] What is 2 plus 2? [/INST][INST] Thank you. [/INST]",
        ),
        (
            None,
            "It is 4.<|endoftext|>été<|endoftext|>",
            "<s>### Instruction:\nWhat is 2 plus 2?\n\n### Response:\n\n\n### Instruction:\nThank you.\n\n### Response:\n",
        ),
    ],
    ids=["by turns", "marked", "no header", "plain"],
)
def test_every_turn_of_the_assistant_is_trained_and_nothing_else(directory, template, trained, rest):
    rows = rows_of(directory, [{"messages": CHAT}], template)
    assert trained_text(rows) == (trained, rest)


words = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1\ufdd2"), max_size=12)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=4), st.sampled_from([CHATML, CHATML_MARKED]))
def test_whatever_is_said_the_parts_are_the_whole(directory, turns, template):
    """Also where words spell special tokens or template code: they stay words."""
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    rows = rows_of(directory, [{"messages": messages}], template)
    chat = rows.chat(0)
    said = [chat.text[first:last].removesuffix("\n").removesuffix("<|im_end|>") for first, last in chat.spans]
    assert said == [answer for _, answer in turns]
    row = rows.whole_row(0)
    assert rows.tokenizer.decode(row.tokens.tolist()) == chat.text
    assert (row.tokens == 2).sum() == len(messages), "one <|im_end|> for each message"


@pytest.mark.parametrize(
    "said", ["<|im_end|>", "a <|endoftext|><s> b", "{{ 7 * 7 }}", "{% generation %}", "<|im_<|im_end|>"]
)
def test_nobody_can_say_a_special_token(directory, said):
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    rows = rows_of(directory, [{"messages": messages}], CHATML)
    tokens = rows.whole_row(0).tokens
    assert [int((tokens == token).sum()) for token in range(4)] == [0, 2, 2, 0]
    ends_of_turns = 2 if said == "<|im_end|>" else 0
    assert rows.tokenizer.decode(tokens.tolist()).count(said) == 2 + ends_of_turns


def test_equal_to_transformers(directory):
    transformers = pytest.importorskip("transformers")
    rows = rows_of(directory, [{"messages": CHAT}], CHATML_MARKED)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(rows.tokenizer.path), chat_template=CHATML_MARKED, bos_token="<s>", eos_token="<|endoftext|>"
    )
    expected = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    row = rows.whole_row(0)
    assert row.tokens.tolist() == expected["input_ids"]
    assert row.trained.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize(
    "template", [CHATML, CHATML_MARKED, INST, None], ids=["by turns", "marked", "no header", "plain"]
)
def test_the_prompt_of_a_chat_is_how_the_trained_row_begins(directory, template):
    """What comes after it is what was trained: the last answer."""
    rows = rows_of(directory, [{"messages": CHAT}], template)
    prompt, _ = encode_chat(rows.template.render_prompt(Conversation(tuple(CHAT[:3])), "row 0"), rows.tokenizer)
    row = rows.whole_row(0)
    assert row.tokens[: len(prompt)].tolist() == prompt
    rest = rows.tokenizer.decode(row.tokens[len(prompt) :].tolist())
    assert rest.strip().startswith("été")
    assert row.trained[len(prompt)]


def test_sentencepiece_conversations(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["What is 2 plus 2? It is 4. [INST] été"] * 50),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    from mindllm.data import load_tokenizer

    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [*CHAT[:3], {"role": "assistant", "content": "日 été"}]})
    )
    (tmp_path / "t.jinja").write_text(INST)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    rows = InstructionRows([str(tmp_path / "rows.jsonl")], tokenizer, 100, chat_template=str(tmp_path / "t.jinja"))
    row = rows.whole_row(0)
    assert row.tokens[0] == tokenizer.bos_id
    assert (row.tokens == tokenizer.eos_id).sum() == 2
    assert tokenizer.decode(row.tokens[row.trained].tolist()) == "It is 4. 日 été"


def test_a_template_that_writes_turns_differently_is_refused_and_one_turn_is_not(directory):
    rows = rows_of(directory, [{"messages": CHAT}, {"messages": CHAT[:2]}], FORGETFUL)
    with pytest.raises(UserError, match=r":1: .*writes turn 1 differently.*{% generation %}"):
        rows.whole_row(0)
    assert trained_text(rows, 1)[0] == "It is 4."


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for %}", "not a chat template, line 1"),
        ("{{ messages.__class__.__mro__ }}", "refuses this conversation"),
        ("{{ messages.append(1) }}", "refuses this conversation"),
        ("{{ raise_exception('no') }}", r"refuses this conversation \(no\)"),
        ("{% generation %}x{% endgeneration %}", "marks 1 parts with generation, the assistant has 2 turns"),
    ],
)
def test_bad_templates(source, says):
    with pytest.raises(UserError, match=says):
        ChatTemplate(source, "t.jinja", {}, []).render(Conversation(tuple(CHAT)), "row 0")


PAIR = [("user", "q"), ("assistant", "a")]
FORMS = {
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, PAIR),
    "alpaca with input": ({"instruction": "q", "input": "x", "output": "a"}, [("user", "q\nx"), ("assistant", "a")]),
    "alpaca with history": (
        {"instruction": "q", "output": "a", "history": [["p", "b"]], "system": "s"},
        [("system", "s"), ("user", "p"), ("assistant", "b"), *PAIR],
    ),
    "sharegpt": ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, PAIR),
    "messages": ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, PAIR),
    "messages in parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
        PAIR,
    ),
    "sharegpt with calls": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": "o"},
                {"from": "gpt", "value": "a"},
            ],
            "tools": "[]",
        },
        [("user", "q"), ("assistant", ""), ("tool", "o"), ("assistant", "a")],
    ),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, PAIR),
    "prompt and completion as messages": (
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
        PAIR,
    ),
    "query and response": (
        {"query": "q", "response": "a", "history": [["p", "b"]], "system": "s"},
        [("system", "s"), ("user", "p"), ("assistant", "b"), *PAIR],
    ),
    "question and answer": ({"question": "q", "answer": "a", "id": 3}, PAIR),
    "input and output": ({"input": "q", "output": "a"}, PAIR),
    "GeneralInstructionHandler": ({"instruction": "q", "input": "", "output": "a"}, PAIR),
    "BelleMultiTurnInstructionHandler": (
        {"instruction": "Human:p\nAssistant: b: c\nHuman: q\nAssistant:", "input": "", "output": "a"},
        [("user", "p"), ("assistant", "b: c"), *PAIR],
    ),
    "MOSSMultiTurnHandler": (
        {"chat": {"turn_1": {"Human": "<|Human|>: q<eoh>\n", "MOSS": "<|MOSS|>: a<eom>\n"}, "turn_2": None}},
        PAIR,
    ),
    "LeetcodePythonInstructionHandler": (
        {"code_with_problem": "q\n```python\ncode```", "code_only": "code", "explanation_only": "why"},
        [("user", "q"), ("assistant", "code\nwhy")],
    ),
    "ADGenInstructionHandler": ({"content": "q", "summary": "a"}, PAIR),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows(form):
    record, expected = FORMS[form]
    handler = form if form.endswith("Handler") else "auto"
    found = read_conversation(record, handler, "row 0")
    assert [(message["role"], message["content"]) for message in found.messages] == expected


def test_calls_of_tools_reach_the_template():
    record, _ = FORMS["sharegpt with calls"]
    tool = {"name": "f", "description": "d", "parameters": {}}
    found = read_conversation({**record, "tools": json.dumps([tool])}, "auto", "row 0")
    assert found.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert found.tools == [tool]
    assert read_conversation(record, "auto", "row 0").tools is None


@pytest.mark.parametrize(
    ("record", "handler", "says"),
    [
        ({"text": "x"}, "auto", "row 7: of no known form"),
        ({"prompt": "q", "completion": "a", "images": ["a.png"]}, "auto", "images: only text can be learnt"),
        ({"instruction": "q", "output": ["a", "b"]}, "auto", r"assistant is not text but \['a', 'b'\]"),
        ({"prompt": "q", "completion": None}, "auto", "assistant is not text but None"),
        ({"prompt": "q"}, "prompt", "has no key 'completion or response or answer or output'"),
        ({"prompt": "q", "completion": "a", "tools": "{"}, "auto", "tools: not JSON"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "auto", "not a row for handler sharegpt"),
        ({"instruction": "q"}, "alpaca", "has no key 'output'"),
        ({"conversations": [{"from": "humn", "value": "q"}]}, "auto", "unknown speaker 'humn'; did you mean 'human'"),
        ({"messages": [{"role": "user", "content": "q"}]}, "auto", "the assistant has no text to learn from"),
        ({"messages": [{"role": "asistant", "content": "q"}]}, "auto", "did you mean 'assistant'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "auto", "is not text but None"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "auto", "only text can be learnt"),
        ({"messages": "hello"}, "auto", "not a row for handler messages"),
        ({"instruction": "hello", "output": "a"}, "BelleMultiTurnInstructionHandler", 'does not begin with "Human:"'),
    ],
)
def test_bad_rows_are_named(record, handler, says):
    with pytest.raises(UserError, match=says) as caught:
        read_conversation(record, handler, "row 7")
    assert str(caught.value).startswith("row 7: ")


def test_long_rows_are_cut_told_and_counted(directory, caplog):
    records = [{"instruction": "q", "output": "It is 4."}, {"instruction": "q", "output": "It is 4. " * 50}]
    records.append({"instruction": "What is 2 plus 2? " * 50, "output": "late"})
    rows = rows_of(directory, records, CHATML, seq_length=60)
    short, long, lost = rows.rows([0, 1, 2])
    whole = rows.whole_row(1)
    assert np.array_equal(long.tokens, whole.tokens[:61])
    assert np.array_equal(long.trained, whole.trained[:61])
    assert not lost.trained.any()
    assert len(caplog.records) == 1
    assert "rows.jsonl:2 has" in caplog.text
    counts = rows.count(range(3))
    assert (counts.truncated, counts.without_loss) == (2, 1)
    assert counts.places.tolist() == [short.places, 60, 0]
    assert counts.trained_tokens == short.trained.sum() + long.trained.sum()
    assert "2 rows are longer than 61 tokens and cut there; 1 rows have no answer" in counts.describe(60)


def test_rows_come_from_many_files_and_compressed_ones(tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "t", CHATML)
    records = [{"instruction": f"q{number}", "output": f"a{number}"} for number in range(7)]
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_text("\n".join(map(json.dumps, records[:2])) + "\n\n")
    (data / "b.json").write_text(json.dumps(records[2:4]))
    with gzip.open(data / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, records[4:6])))
    (data / "d.csv").write_text('instruction,output\nq6,"a6"\n')
    rows = InstructionRows([str(data)], tokenizer, 50)
    assert len(rows) == 7
    assert all(f"q{number}<|im_end|>" in rows.chat(number).text for number in range(7))


def test_a_token_over_the_border_of_an_answer_is_cut_there(directory):
    """ " It" is one token; the prompt ends with the space, and is encoded without the answer in generation."""
    rows = rows_of(directory, [{"messages": CHAT[:2]}], FORGETFUL)
    prompt = rows.tokenizer.encode_marked("<|im_start|>user: What is 2 plus 2?<|im_start|>assistant: ")[0]
    row = rows.whole_row(0)
    assert row.tokens[: len(prompt)].tolist() == prompt
    assert row.trained.tolist() == [False] * len(prompt) + [True] * (len(row.tokens) - len(prompt))


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8).map(sorted))
def test_a_token_is_trained_when_all_of_it_lies_in_one_span(borders):
    spans = [(first, last) for first, last in zip(borders[::2], borders[1::2], strict=False) if first < last]
    places = [(first, last) for first in range(31) for last in range(first + 1, 31)]
    inside = [any(first <= a and b <= last for first, last in spans) for a, b in places]
    assert trained_tokens(places, spans).tolist() == inside
