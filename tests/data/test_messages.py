"""What a row says reaches the text in every form of row, or the row is refused by name."""

import json

import pytest
from chats import CHATML, CHATML_MARKED, chat_tokenizer, template_of

from mindllm.data.chat.conversations import Conversation, is_learned, read_conversation, read_message, read_tools
from mindllm.data.chat.instruction import InstructionRows
from mindllm.data.chat.pairs import AnswerRows, PairRows, answer_in, pair_of
from mindllm.data.chat.template import ChatTemplate
from mindllm.data.records import read_records
from mindllm.data.tokenizers.files import copy_tokenizer
from mindllm.data.tokenizers.tokenizer import load_tokenizer
from mindllm.errors import UserError

ASKED = {"role": "user", "content": "weather in Oslo"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "ask the tool"}
READ = {
    "role": "assistant",
    "content": None,
    "tool_calls": [CALL],
    "thinking": "ask the tool",
    "reasoning_content": "ask the tool",
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMS = {
    "messages": {"messages": [ASKED, CALLED]},
    "conversations": {"conversations": [ASKED, CALLED]},
    "from and value": {
        "conversations": [{"from": "human", "value": ASKED["content"]}, {**CALLED, "from": "gpt", "value": None}]
    },
    "completion": {"prompt": [ASKED], "completion": [CALLED]},
    "one message": {"prompt": ASKED["content"], "completion": CALLED},
    "JSON text": {"messages": json.dumps([ASKED, CALLED])},
    "arguments as text": {
        "messages": [
            ASKED,
            {**CALLED, "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        ]
    },
    "an older call": {
        "messages": [
            ASKED,
            {**CALLED, "tool_calls": None, "function_call": {"name": "weather", "arguments": {"city": "Oslo"}}},
        ]
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_keeps_calls_and_thoughts(form):
    row = read_conversation({**FORMS[form], "tools": TOOLS}, "auto", "row")
    text = ChatTemplate(CALLS, "t", {}, []).render(row, "row")
    assert row.tools == TOOLS
    assert [text.text[begin:end] for begin, end in text.spans] == [
        '<think>ask the tool</think>CALL {"name": "weather", "arguments": {"city": "Oslo"}}<|im_end|>\n'
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASKED], "chosen": [CALLED], "rejected": "No."},
        {"prompt": "weather in Oslo", "chosen": CALLED, "rejected": [{"role": "assistant", "content": "No."}]},
        {"chosen": [ASKED, CALLED], "rejected": [ASKED, {"role": "assistant", "content": "No."}]},
        {"conversations": [ASKED], "chosen": CALLED, "rejected": {"from": "gpt", "value": "No."}},
        {"messages": [ASKED, CALLED], "rejected_response": "No."},
    ],
)
def test_pairs_keep_calls_and_tools(row):
    pair = pair_of({**row, "tools": TOOLS}, "row")
    assert (pair.chosen.messages, pair.chosen.tools) == ((ASKED, READ), TOOLS)
    assert pair.rejected.messages[-1] == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize("row", [{"messages": [ASKED, CALLED]}, {"prompt": [ASKED], "completion": [CALLED]}])
def test_labelled_answers_keep_calls_and_tools(row):
    answer = answer_in({**row, "label": True, "tools": json.dumps(TOOLS)}, "row")
    assert (answer.answer, answer.tools) == ((READ,), TOOLS)


NULL_IS_A_CALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m['content'] is none %}{% for c in m.tool_calls %}"
    "CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (NULL_IS_A_CALL, 'CALL weather {"city": "Oslo"}<|im_end|>\n'),
        # null is written as None, and a missing content is not
        (
            NULL_IS_A_CALL.replace("m['content'] is none", "'content' not in m"),
            'CALL weather {"city": "Oslo"}<|im_end|>\n',
        ),
        # only an empty content is added to a text
        (
            CHATML.replace(
                "message['content']", "message['content'] + (message.tool_calls | tojson if message.tool_calls else '')"
            ),
            '[{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]<|im_end|>\n',
        ),
        # arguments are expected as text: added to one, or written as they are
        (
            NULL_IS_A_CALL.replace("c.function.arguments | tojson", "'' + c.function.arguments"),
            'CALL weather {"city": "Oslo"}<|im_end|>\n',
        ),
        (
            NULL_IS_A_CALL.replace("c.function.arguments | tojson", "c.function.arguments"),
            'CALL weather {"city": "Oslo"}<|im_end|>\n',
        ),
    ],
    ids=["null", "missing", "empty", "text is added", "text is written"],
)
@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_calls_have_the_form_that_the_template_expects(template, learned, arguments):
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": arguments}}],
    }
    row = read_conversation({"messages": [ASKED, message]}, "auto", "row")
    chat = ChatTemplate(template, "t", {}, []).render(row, "row")
    assert [chat.text[begin:end] for begin, end in chat.spans] == [learned]


LOST = {
    "a call": (
        [ASKED, {**CALLED, "content": "", "reasoning_content": None}],
        None,
        CHATML,
        "call of weather in messages\\[1\\]",
    ),
    "its arguments": (
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        None,
        CHATML.replace(
            "message['content']",
            "message['content'] + (message.tool_calls[0].function.name if message.tool_calls else '')",
        ),
        "argument city of the call of weather",
    ),
    "a tool": ([ASKED, {"role": "assistant", "content": "3"}], TOOLS, CHATML, "tool weather"),
    "a thought": (
        [ASKED, {"role": "assistant", "content": "3", "reasoning_content": "so"}],
        None,
        CHATML_MARKED,
        "reasoning_content of messages\\[1\\]",
    ),
    "a result": (
        [ASKED, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}],
        None,
        CHATML.replace("{{ '<|im_start|>'", "{% if message.role != 'tool' %}{{ '<|im_start|>'").replace(
            "{% endfor", "{% endif %}{% endfor"
        ),
        "content of messages\\[1\\] \\(tool\\)",
    ),
    "a call that the template compares": (
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        None,
        "{% for m in messages %}{% for c in m.tool_calls or [] if c.function.name != 'weather' %}{{ raise_exception('unknown') }}"
        "{% endfor %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_a_row_that_loses_a_part_is_a_bad_row(tmp_path, name):
    messages, tools, template, part = LOST[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": tools}) + "\n")
    fault = InstructionRows([str(path)], chat_tokenizer(tmp_path / "model", template), 200).fault(0)
    if not part:  # found by its words, as the user has them
        assert fault == ""
        return
    with pytest.raises(AssertionError if not fault else UserError, match=f"rows.jsonl:1: .* leaves out {part}"):
        raise UserError(fault)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, None])
def test_turns_with_a_weight_of_0_are_read_and_not_learned(tmp_path, template):
    turns = [{"weight": 0}, {"weight": 1}, {"loss": False}, {"loss": True, "weight": 1.0}, {}]
    answers = [{"role": "assistant", "content": f"answer {number}", **turn} for number, turn in enumerate(turns)]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [message for answer in answers for message in (ASKED, answer)]}) + "\n")
    rows = InstructionRows([str(path)], chat_tokenizer(tmp_path / "model", template), 400)
    row = rows.whole_row(0)
    learned = rows.tokenizer.decode(row.tokens[row.trained].tolist())
    assert [f"answer {number}" in learned for number in range(5)] == [False, True, False, True, True]
    assert all(f"answer {number}" in rows.chat(0).text for number in range(5))


def test_weights_that_cannot_be_learned_so():
    half = {"messages": [ASKED, {"role": "assistant", "content": "3", "weight": 0.5}]}
    with pytest.raises(
        UserError, match=r"row: .*weight of the assistant is 0\.5; write 1 to learn the turn, 0 to only read it"
    ):
        read_conversation(half, "auto", "row")
    none = {"messages": [ASKED, {"role": "assistant", "content": "3", "weight": 0}]}
    with pytest.raises(UserError, match="row: weight or loss of every turn of the assistant is 0; remove the row"):
        read_conversation(none, "auto", "row")


def test_a_turn_that_is_not_learned_may_be_written_differently():
    """As templates do that take earlier thoughts out."""
    forgetful = CHATML.replace("message['content']", "(message['content'] if loop.last else message['content'][:2])")
    turns = [
        {"role": "assistant", "content": "long answer", "weight": 0},
        ASKED,
        {"role": "assistant", "content": "42"},
    ]
    chat = ChatTemplate(forgetful.replace("loop.last", "loop.last or message.role == 'user'"), "t", {}, [])
    chat = chat.render(Conversation((ASKED, *turns)), "row")
    assert [chat.text[begin:end] for begin, end in chat.spans] == ["42<|im_end|>\n"]


THINKING = (  # an empty thought before the last answer alone
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LATE_TOOLS = (  # tools before the last question, and no header of the assistant
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 >= messages | length - 2 %}{{ tools | tojson }}"
    "{% endif %}[INST]{{ m.content }}[/INST]{% else %}{% for c in m.tool_calls or [] %}[CALL]{{ c.function | tojson }}"
    "{% endfor %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (THINKING, ['3 "degrees"<|im_end|>\n', 'CALL {"name": "weather", "arguments": {"city": "Oslo"}}<|im_end|>\n']),
        (LATE_TOOLS, ['3 "degrees"</s>', '[CALL]{"name": "weather", "arguments": {"city": "Oslo"}}</s>']),
    ],
)
def test_turns_that_are_written_differently_have_exact_borders(template, learned):
    answers = [
        {"role": "assistant", "content": '3 "degrees"'},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "4"},
    ]
    asked = {"role": "user", "content": "weather? "}
    row = Conversation(
        tuple(message for answer in answers for message in (asked, answer)), TOOLS if "tools" in template else None
    )
    chat = ChatTemplate(template, "t", {}, []).render(row, "row")
    last = "4</s>" if "INST" in template else "<think></think>\n4<|im_end|>\n"
    assert [chat.text[begin:end] for begin, end in chat.spans] == [*learned, last]


def test_shared_turns_of_pairs_are_not_learned(tmp_path):
    history = [ASKED, {"role": "assistant", "content": "earlier"}, ASKED]
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": history, "chosen": "yes", "rejected": "no"}) + "\n")
    rows = PairRows([str(path)], chat_tokenizer(tmp_path / "model", CHATML), 200)
    learned = [rows.tokenizer.decode(row.tokens[row.trained].tolist()) for row in rows.whole_rows(0)]
    assert learned == ["yes<|im_end|>\n", "no<|im_end|>\n"]
    alone = AnswerRows([str(path)], rows.tokenizer, 200, alone=True, chat_template="")
    assert len(alone) == 2


def test_names_of_special_tokens_are_counted_or_kept(tmp_path):
    answer = "a <|im_start|> b <|im_end|>"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [ASKED, {"role": "assistant", "content": answer}]}))
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "q", "chosen": answer, "rejected": "no"}))
    tokenizer = chat_tokenizer(tmp_path / "model", CHATML)
    start = tokenizer.encode_marked("<|im_start|>")[0][0]
    for make, name in ((InstructionRows, "rows"), (PairRows, "pairs"), (AnswerRows, "pairs")):
        path, options = [str(tmp_path / f"{name}.jsonl")], {"alone": True} if make is AnswerRows else {}
        words = make(path, tokenizer, 200, **options)
        assert words.count([0]).spelled_out == words.count([0]).spelled_out == 2
        assert "2 names of special tokens in messages are encoded as words" in words.count([0]).describe(200)
        kept = make(path, tokenizer, 200, allowed_special_tokens=["<|im_start|>"], **options)
        assert kept.count([0]).spelled_out == 1
        row, same = (rows.rows([0])[0] if make is not AnswerRows else rows.whole_rows(0)[0] for rows in (kept, words))
        assert (row.tokens == start).sum() == (same.tokens == start).sum() + 1


GREETING = [{"role": "assistant", "content": "Hello."}, ASKED, {"role": "assistant", "content": "3"}]
FIRST = "{% if messages[0]['role'] == 'system' %}S{% endif %}"


@pytest.mark.parametrize("template", [CHATML, FIRST + CHATML, CHATML_MARKED])
def test_a_conversation_may_begin_with_the_assistant(template):
    chat = ChatTemplate(template, "t", {}, []).render(Conversation(tuple(GREETING)), "row")
    learned = [chat.text[begin:end].removesuffix("\n") for begin, end in chat.spans]
    assert learned == ["Hello.<|im_end|>", "3<|im_end|>"]


def test_a_greeting_whose_words_cannot_be_told_is_refused():
    bare = ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}", "t", {}, [])
    with pytest.raises(UserError, match="row: begins with the assistant, and t does not say where its words begin"):
        bare.render(Conversation(tuple(GREETING)), "row")
    chat = bare.render(Conversation(({**GREETING[0], "weight": 0}, *GREETING[1:])), "row")
    assert [chat.text[begin:end] for begin, end in chat.spans] == ["3;"]


def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path, caplog):
    named = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "TOOLS {{ tools | tojson }}\n" + CHATML},
    ]
    chat_tokenizer(tmp_path, named)
    rows = (
        Conversation((ASKED, {"role": "assistant", "content": "3"})),
        Conversation((ASKED, {"role": "assistant", "content": "3"}), TOOLS),
    )

    def written():
        template = template_of(tmp_path)
        return [template.render(row, "row").text[:12] for row in rows] + [
            template.render_prompt(rows[1], "row").text[:5]
        ]

    assert written() == ["<|im_start|>", 'TOOLS [{"typ', "TOOLS"]
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("TOOLS {{ tools | tojson }}\n" + CHATML)
    assert written() == ["<|im_start|>", 'TOOLS [{"typ', "TOOLS"]
    assert not caplog.records
    (tmp_path / "copy").mkdir()
    copy_tokenizer(load_tokenizer(tmp_path), tmp_path / "copy")
    assert template_of(tmp_path / "copy").for_tools.source.startswith("TOOLS")


def test_a_template_that_cannot_show_tools_is_told_once(caplog):
    template = ChatTemplate(CHATML, "t.jinja", {}, [])
    for _ in range(2):
        template.render_prompt(Conversation((ASKED,), TOOLS), "row")
    assert len(caplog.records) == 1
    assert "t.jinja cannot show tools: it does not read the variable tools" in caplog.text


def test_parquet_has_no_null_entries(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
                },
            ],
            "text": None,
        }
        for name, arguments in (("weather", {"city": "Oslo"}), ("add", {"a": 1}))
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = read_records(tmp_path / "rows.parquet")
    assert second["text"] is None, "a column that is null is a key that is null"
    assert second["messages"][1]["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]
    chat = ChatTemplate(CALLS, "t", {}, []).render(read_conversation(first, "auto", "row"), "row")
    assert "null" not in chat.text
    assert '"arguments": {"city": "Oslo"}' in chat.text


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"role": "assistant", "content": "a", "tool_calls": "{"}, "Expecting property name"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}, "not a list of calls with names"),
        ({"role": "assistant", "content": "a", "tool_calls": {"name": "f"}}, "not a list of calls with names"),
        ({"role": "user", "content": None}, "content of the user is not text but None"),
        ({"role": ["user"], "content": "a"}, "unknown role"),
        ({"role": "assistant", "content": "a", "loss": "no"}, "loss of the assistant is no"),
    ],
)
def test_turns_that_are_refused(turn, says):
    with pytest.raises(ValueError, match=says):
        read_message(turn)


def test_a_message_is_read_once():
    message = read_message({**CALLED, "from": "gpt", "value": None})
    assert read_message(message) == message
    assert is_learned(message)
    assert [read_tools(tools) for tools in (None, [], "", "[]")] == [None] * 4
    assert read_tools([json.dumps(TOOLS[0])]) == TOOLS
    with pytest.raises(ValueError, match="a tool is an object, not 3"):
        read_tools([3])
