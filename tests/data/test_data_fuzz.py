"""Odd tokenizers, templates and rows, drawn from a seed: each is taken, or refused in one line, and nothing is left behind."""

import json
import random

import pytest
from chats import CHATML, chat_tokenizer
from test_messages import CALLS

from mindllm.data import load_tokenizer
from mindllm.data.chat import template as template_process
from mindllm.data.chat.conversations import HANDLERS, read_conversation
from mindllm.data.chat.instruction import encode_chat
from mindllm.data.chat.pairs import answer_in, pair_of
from mindllm.data.chat.template import ChatTemplate, chat_template_of
from mindllm.errors import UserError

ODD = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "a",
    "\ufdd0",
    "<|im_end|>",
    "é" * 50,
    [],
    [[]],
    {},
    {"a": None},
    [1, "a"],
    "{",
    "[]",
]


def refused_or(function, *arguments):
    """The result of a function, or nothing where it refuses in one line of bounded length."""
    try:
        return function(*arguments)
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 2500
    return None


def odd(draw):
    return json.loads(json.dumps(draw.choice(ODD)))


def mutated(draw, tree):
    """A copy of ``tree`` with something odd at a random place."""
    copy = json.loads(json.dumps(tree))
    for _ in range(draw.randint(1, 3)):
        node = copy
        while isinstance(node, dict | list) and node:
            key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], dict | list) or not node[key] or draw.random() < 0.3:
                node[key] = odd(draw)
                break
            node = node[key]
    return copy


STEPS = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "b"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "NFKC"},
    {"type": "Strip", "strip_left": True, "strip_right": False},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Fuse"},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
]
PIECES = ["(", ")", "a", "+", "*", "?", "|", "[", "]", r"\p{L}", "{2,}", "(?=a)", r"\s", "(?i:", "^", "."]


@pytest.mark.parametrize("seed", range(4))
def test_tokenizers(tmp_path, seed):
    draw = random.Random(seed)
    chat_tokenizer(tmp_path, CHATML)
    files = {name: json.loads((tmp_path / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")}
    small = {
        **files["tokenizer.json"],
        "model": {"type": "BPE", "vocab": {"a": 4, "b": 5, "ab": 6}, "merges": [["a", "b"]]},
    }
    for number in range(30):
        content = dict(small)
        for section, key in (
            ("normalizer", "normalizers"),
            ("pre_tokenizer", "pretokenizers"),
            ("decoder", "decoders"),
        ):
            if draw.random() < 0.5:
                content[section] = {"type": "Sequence", key: draw.sample(STEPS, draw.randint(1, 3))}
        if number % 10 == 0:
            pattern = "".join(draw.choices(PIECES, k=draw.randint(1, 8)))
            content["pre_tokenizer"] = {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        (tmp_path / "tokenizer.json").write_text(json.dumps(mutated(draw, content) if number % 2 else content))
        config = mutated(draw, files["tokenizer_config.json"]) if number % 3 == 0 else files["tokenizer_config.json"]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if (tokenizer := refused_or(load_tokenizer, tmp_path)) is None:
            continue
        for text in ("", "aab <|im_end|> é\n", "a" * 300):
            if ids := refused_or(tokenizer.encode, text):
                refused_or(tokenizer.decode, ids)
            refused_or(tokenizer.encode_marked, text)
        refused_or(tokenizer.allowing, ["<|im_end|>"])
        refused_or(lambda tokenizer=tokenizer: tokenizer.fingerprint)
        refused_or(chat_template_of, tokenizer)


FRAGMENTS = [
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[0].role }}", "{% if tools %}", "{% endif %}",
    "{{ tools | tojson(indent=2) }}", "{% generation %}", "{% endgeneration %}", "{{ m.tool_calls[0].function.arguments.x }}",
    "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ strftime_now(3) }}", "{{ '%s' % m }}", "{% set x = m %}",
    "{{ 'a' * 10**9 }}", "{{ messages | tojson(ensure_ascii=True, separators=3) }}", "{% break %}", "{{ x.y.z }}", "{{", "}}",
    "{% macro f(x) %}", "{% endmacro %}", "{{ f(1) }}", "\ufdd3", "{{ messages | map(attribute='content') | join }}",
    "<|im_start|>",
]  # fmt: skip


def odd_turn(draw):
    turn = {
        "role": draw.choice(["user", "assistant", "tool", "developer", "gpt"]),
        "content": draw.choice(["a", "", "b c"]),
    }
    if draw.random() < 0.5:
        call = {
            "type": "function",
            "function": {"name": "f", "arguments": draw.choice([{"x": 1}, '{"x": 1}', "{", None, {}])},
        }
        turn |= {"tool_calls": draw.choice([[call], [call, call], [], "[]"]), "content": draw.choice([None, "a"])}
    turn |= draw.choice(
        [{}, {"weight": 0}, {"loss": True}, {"reasoning_content": "why"}, {"thinking": 3}, {"name": "n"}]
    )
    return mutated(draw, turn) if draw.random() < 0.3 else turn


def odd_row(draw):
    turns = [odd_turn(draw) for _ in range(draw.randint(0, 4))]
    key = draw.choice(["messages", "conversations", "completion", "chosen", "prompt"])
    row = {
        key: turns,
        **draw.choice([{}, {"prompt": "q"}, {"rejected": "r"}, {"rejected_response": turns}, {"label": True}]),
    }
    row |= draw.choice([{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tools": odd(draw)}])
    row |= draw.choice([{}, {}, {"chat_template_kwargs": draw.choice([{"a": 1}, {"messages": 1}, odd(draw)])}])
    return mutated(draw, row) if draw.random() < 0.3 else row


@pytest.mark.parametrize("seed", range(4))
def test_rows(tmp_path, seed):
    draw = random.Random(seed)
    tokenizer = chat_tokenizer(tmp_path, CALLS)
    template = chat_template_of(tokenizer)
    rendered = 0
    for _ in range(250):
        row = odd_row(draw)
        conversation = refused_or(read_conversation, row, draw.choice(["auto"] * 30 + [*HANDLERS]), "row")
        refused_or(pair_of, row, "row")
        refused_or(answer_in, row, "row")
        if conversation and (chat := refused_or(template.render, conversation, "row")):
            ids, _ = encode_chat(chat, tokenizer)
            assert ids or not chat.text
            rendered += 1
    assert rendered > 5


def test_templates(monkeypatch):
    draw = random.Random(7)
    monkeypatch.setattr(template_process, "SECONDS", 0.2)
    rows = [refused_or(read_conversation, odd_row(draw), "auto", "row") for _ in range(200)]
    conversations = [row for row in rows if row]
    rendered = 0
    for _ in range(60):
        source = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 6)))
        source = source if draw.random() < 0.3 else "{% for m in messages %}" + source + "{{ m.content }}{% endfor %}"
        if template := refused_or(ChatTemplate, source, "t.jinja", {"bos_token": "<s>"}, ["<|im_start|>"]):
            for conversation in draw.sample(conversations, 2):
                rendered += refused_or(template.render_prompt, conversation, "row") is not None
                refused_or(template.render, conversation, "row")
    assert rendered > 8
