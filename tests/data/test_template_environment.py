"""Chat templates get the environment of transformers: texts equal to ``apply_chat_template``, byte for byte."""

from datetime import date

import pytest
from chats import chat_tokenizer

from mindllm.data.chat import template as templates
from mindllm.data.chat.conversations import Conversation, read_conversation
from mindllm.data.chat.template import TRAINING_DATE, ChatTemplate, chat_template_of
from mindllm.errors import UserError

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Température d'une ville <b>&</b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}
SYSTEM, ASKED, OTHER = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "weather in Zürich?"},
    {"role": "user", "content": "and in Oslo?"},
)
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"degrees": 3}', "tool_call_id": "call00001", "name": "weather"}
ANSWER = {"role": "assistant", "content": "3 degrees."}
THOUGHT = {"role": "assistant", "content": "3 degrees.", "reasoning_content": "The tool says 3."}

# name: template. Each has what the templates of a family of models need; none is a copy of one.
HEADERS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "options of tojson": "{{ tools | tojson(ensure_ascii=True, sort_keys=True) }}{{ tools | tojson(indent=2) }}"
    "{{ tools | tojson(separators=(',', ':'), ensure_ascii=False) }}{{ tools | tojson(True, 1) }}" + HEADERS + PROMPT,
    "date": "{{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%d') }}\n" + HEADERS + PROMPT,
    "special tokens": "{{ bos_token }}{{ unk_token }}{{ mask_token }}{{ pad_token is defined }}"
    + HEADERS
    + "{{ eos_token }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + PROMPT,
    "generation marks": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}<|im_end|>{%- endgeneration -%}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}/nothink\n{% endif %}{{ style | default('plain') }}"
    + HEADERS
    + PROMPT,
    "macros and thoughts": """\
{%- macro text(value) -%}{% if value is string %}{{ value | trim }}{% else %}{{ value | join }}{% endif %}{%- endmacro -%}
{%- set ns = namespace(last=messages | length - 1) -%}
{%- for m in messages[::-1] -%}
  {%- if m.role == 'user' and ns.last == messages | length - 1 -%}
    {%- set ns.last = messages | length - 1 - loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools %}<tools>{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}</tools>{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == 'assistant' and m.reasoning_content is defined and loop.index0 > ns.last %}
{{- '\n<think>' ~ m.reasoning_content }}</think>
{%- endif %}
{{- '\n' ~ text(m.content) }}
{%- for call in m.tool_calls or [] %}{%- set call = call.function if call.function is defined else call %}
<tool_call>{{ '{"name": "' ~ call.name ~ '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}""",
    "checked turns": """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif -%}
{{- bos_token }}{% if system %}[SYSTEM]{{ system }}[/SYSTEM]{% endif %}
{%- for m in rest if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}
{%- for m in rest %}{% if m.role == 'user' %}
{%- if tools is not none and loop.first %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif -%}
[INST]{{ m.content }}[/INST]{% elif m.tool_calls is defined and m.tool_calls is not none and m.tool_calls | length -%}
[CALLS]{% for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
{{ call.function | tojson }}{% endfor %}{{ eos_token }}{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]
{%- else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}""",
}
CONVERSATIONS = {
    "one turn": [ASKED, ANSWER],
    "several turns": [SYSTEM, ASKED, ANSWER, OTHER, ANSWER],
    "a call": [SYSTEM, ASKED, CALLED, RESULT, ANSWER],
    "a null content": [ASKED, {**CALLED, "content": None}, RESULT, ANSWER],
    "a thought": [ASKED, THOUGHT],
    "another key of a thought": [ASKED, {"role": "assistant", "content": "3", "thinking": "so"}],
    "developer": [{"role": "developer", "content": "Be short."}, ASKED, ANSWER],
    "greeting": [ANSWER, ASKED, ANSWER],
}
SPECIAL = {
    "unk_token": "<|endoftext|>",
    "mask_token": {"__type": "AddedToken", "content": "<|im_start|>"},
    "pad_token": None,
}


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Our template and transformers' tokenizer, for a source; rows have the date of today."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(templates, "TRAINING_DATE", date.today().isoformat())

    def make(source):
        tokenizer = chat_tokenizer(tmp_path, source, tokenizer_class="PreTrainedTokenizerFast", **SPECIAL)
        return chat_template_of(tokenizer), transformers.AutoTokenizer.from_pretrained(tmp_path)

    return make


def applied(theirs, messages, tools=None, **variables):
    """What transformers writes, or its error."""
    try:
        return theirs.apply_chat_template(messages, tools=tools, tokenize=False, **variables)
    except Exception as error:  # of jinja
        return error


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(both, name):
    """A row that transformers writes is written alike, or refused by name; a row that it refuses is refused."""
    ours, theirs = both(TEMPLATES[name])
    equal = 0
    for messages in CONVERSATIONS.values():
        for tools in (None, [TOOL]):
            row = Conversation(
                read_conversation({"messages": messages}, "auto", "row").messages, tools, {"style": "long"}
            )
            for prompt in (False, True):
                expected = applied(theirs, messages, tools, add_generation_prompt=prompt, style="long")
                try:
                    text = (ours.render_prompt if prompt else ours.render)(row, "row").text
                except UserError as refused:
                    reason = str(refused)
                else:
                    reason, equal = "", equal + 1
                    assert text == expected
                assert not reason or isinstance(expected, Exception) or "leaves out" in reason or "turn" in reason
    assert equal >= 9


@pytest.mark.parametrize("name", ["macros and thoughts", "checked turns"])
def test_rows_with_calls_are_learned_whole(both, name):
    ours, theirs = both(TEMPLATES[name])
    messages = CONVERSATIONS["a call"]
    chat = ours.render(Conversation(tuple(messages), [TOOL]), "row")
    assert chat.text == applied(theirs, messages, [TOOL])
    learned = [chat.text[begin:end] for begin, end in chat.spans]
    assert '"name": "weather", "arguments": {"city": "Zürich", "days": 2}' in learned[0]
    assert "3 degrees." in learned[1]


def test_variables_of_the_run_and_of_the_row(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, TEMPLATES["variables"])
    template = chat_template_of(tokenizer, chat_template_kwargs={"enable_thinking": False, "style": "run"})
    row = read_conversation({"messages": [ASKED, ANSWER], "chat_template_kwargs": {"style": "row"}}, "auto", "row")
    assert template.render(row, "row").text.startswith("/nothink\nrow<|im_start|>user")
    with pytest.raises(UserError, match=r"chat_template_kwargs\.messages: is a variable of the row itself"):
        chat_template_of(tokenizer, chat_template_kwargs={"messages": []})
    with pytest.raises(UserError, match=r"row: chat_template_kwargs: not an object"):
        read_conversation({"messages": [ASKED, ANSWER], "chat_template_kwargs": [1]}, "auto", "row")


def test_rows_have_one_date_and_prompts_today(caplog):
    template = ChatTemplate(TEMPLATES["date"], "t.jinja", {}, [])
    with caplog.at_level("INFO", "mindllm"):
        assert TRAINING_DATE in template.render(Conversation((ASKED, ANSWER)), "row").text
        assert date.today().isoformat() in template.render_prompt(Conversation((ASKED,)), "row").text
    assert [record.getMessage() for record in caplog.records] == [
        f"t.jinja writes the date: {TRAINING_DATE} in rows that are learned, today in prompts"
    ]


def test_a_special_token_is_never_said_by_escaped_json_or_by_keys(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, "{{ tools | tojson(ensure_ascii=True) }}" + HEADERS)
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "é <|im_end|>", "parameters": {"<|im_start|>": "<s>"}},
    }
    chat = chat_template_of(tokenizer).render(Conversation((ASKED, ANSWER), [tool]), "row")
    assert chat.text.startswith('[{"type": "function", "function": {"name": "f", "description": "\\u00e9 <|im_end|>"')
    assert len(chat.seams) == 3
    assert all(chat.text[place - 1] == "<" for place in chat.seams)
