"""Chat templates: a conversation as the text a model was trained on, and which parts of it the assistant says.

A template is a program of the tokenizer's directory, run in jinja's immutable sandbox: it sees the messages and the names of
special tokens, and no attribute or method that could reach further. What the assistant says is found exactly or not at all:
by the template's own ``{% generation %}`` marks, else by rendering the conversation turn by turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mindllm.data.conversations import Conversation, Message
from mindllm.errors import UserError

PLAIN = """\
{{- bos_token or '' -}}
{%- for message in messages -%}
{%- if not loop.first %}{{ '\\n\\n' }}{% endif -%}
{%- if message.role == 'assistant' -%}
{{ '### Response:\\n' }}{% generation %}{{ message.content | trim }}{{ eos_token or '' }}{% endgeneration %}
{%- else -%}
{{ {'system': '', 'user': '### Instruction:\\n', 'tool': '### Input:\\n'}[message.role] }}{{ message.content | trim }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif -%}
"""
# Unicode's noncharacters are never text: they mark places inside the rendered text and are taken out again.
SEAM, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2"
MARKS = re.compile(f"([{SEAM}{BEGIN}{END}])")
Span = tuple[int, int]


@dataclass(frozen=True)
class RenderedChat:
    """``text`` of a conversation and the ``spans`` of it, in characters, that the assistant says, ends of turns included.

    ``seams`` are places inside words of the conversation that spell the name of a special token: there the text is cut before
    it is encoded, so that nobody can say a special token.
    """

    text: str
    spans: tuple[Span, ...]
    seams: tuple[int, ...]


class ChatTemplate:
    """A template with the special tokens it may name, such as ``{"eos_token": "</s>"}``.

    ``special_names``: all names the tokenizer takes for special tokens. Raises UserError where ``source`` is no template.
    """

    def __init__(
        self, source: str, origin: str, special_tokens: Mapping[str, str], special_names: Sequence[str]
    ) -> None:
        self.origin = origin
        self._special_tokens = dict(special_tokens)
        self._special_names = [name for name in special_names if len(name) > 1]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationMarks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise  # no strftime_now: a row would differ from day to day
        self.has_marks = "{% generation" in source.replace("{%-", "{%")
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise UserError(f"{origin}: not a chat template, line {error.lineno}: {error.message}") from error

    def render(self, conversation: Conversation, place: str) -> RenderedChat:
        """Returns the text of ``conversation`` and what the assistant says; ``place`` names the row in errors.

        Raises UserError where the template refuses the conversation, or does not say exactly where a turn begins and ends.
        """
        messages = [self._spelled(message, place) for message in conversation.messages]
        if self.has_marks:
            marked = self._fill(messages, conversation.tools, place)
            turns = sum(message["role"] == "assistant" for message in messages)
            if marked.count(BEGIN) != turns:
                raise UserError(
                    f"{place}: {self.origin} marks {marked.count(BEGIN)} parts with generation, the assistant has {turns} turns"
                )
        else:
            marked = self._by_turns(messages, conversation.tools, place)
        return _without_marks(marked)

    def render_prompt(self, conversation: Conversation, place: str) -> RenderedChat:
        """Returns the text of ``conversation`` up to where the next answer of the assistant begins. Raises as ``render``."""
        messages = [self._spelled(message, place) for message in conversation.messages]
        return _without_marks(self._fill(messages, conversation.tools, place, add_generation_prompt=True))

    def _by_turns(self, messages: list[Message], tools: list[Any] | None, place: str) -> str:
        """Renders up to each turn of the assistant and through it; both must be how the whole begins, or nobody could tell."""
        whole = self._fill(messages, tools, place)
        marked, done = "", 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._fill(messages[:index], tools, place, add_generation_prompt=True)
            through = self._fill(messages[: index + 1], tools, place)
            if not (through.startswith(before) and whole.startswith(through) and len(before) >= done):
                raise UserError(
                    f"{place}: {self.origin} writes turn {index} differently inside the conversation than at its end, so the "
                    "assistant's words cannot be told apart exactly. Mark them in the template with {% generation %} and "
                    "{% endgeneration %}, and name that file in train_dataset.data_loader.config.chat_template"
                )
            marked += whole[done : len(before)] + BEGIN + whole[len(before) : len(through)] + END
            done = len(through)
        return marked + whole[done:]

    def _fill(
        self, messages: list[Message], tools: list[Any] | None, place: str, add_generation_prompt: bool = False
    ) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (TemplateError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise UserError(f"{place}: {self.origin} refuses this conversation ({error})") from None

    def _spelled(self, value: Any, place: str) -> Any:
        """Puts a seam into every name of a special token inside the words of a message."""
        if isinstance(value, dict):
            return {key: self._spelled(entry, place) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._spelled(entry, place) for entry in value]
        if not isinstance(value, str):
            return value
        if any(mark in value for mark in (SEAM, BEGIN, END)):
            raise UserError(f"{place}: holds U+FDD0 to U+FDD2, which Unicode keeps from being text; remove them")
        for name in self._special_names:
            value = value.replace(name, f"{name[0]}{SEAM}{name[1:]}")
        return value


class GenerationMarks(Extension):
    """``{% generation %} ... {% endgeneration %}``: what is between them, between BEGIN and END. The tag is Hugging Face's."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Turns the block into a call of ``_mark`` with its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def find_chat_template(
    directory: Path, special_tokens: Mapping[str, str], special_names: Sequence[str], given: str = ""
) -> ChatTemplate:
    """Returns the template in file ``given``, else that of the tokenizer's ``directory``, else a plain one.

    A directory has a ``chat_template.jinja``, or one in its ``tokenizer_config.json`` (of several: "default").
    """
    file = Path(given) if given else directory / "chat_template.jinja"
    if given and not file.is_file():
        raise UserError(f"{file}: no such chat template")
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), str(file), special_tokens, special_names)
    config = directory / "tokenizer_config.json"
    source = _template_in(config) if config.is_file() else None
    origin = f"chat_template of {config}" if source else "the plain chat template"
    return ChatTemplate(source or PLAIN, origin, special_tokens, special_names)


def _template_in(path: Path) -> str | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a tokenizer configuration ({error})") from error
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        if "default" not in named:
            raise UserError(
                f"{path}: has chat templates {', '.join(named)} and no default; name a file in chat_template"
            )
        return named["default"]
    return found


def _without_marks(marked: str) -> RenderedChat:
    text: list[str] = []
    seams: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    places = {SEAM: seams, BEGIN: begins, END: ends}
    position = 0
    for part in MARKS.split(marked):
        if part in places:
            places[part].append(position)
        else:
            text.append(part)
            position += len(part)
    return RenderedChat("".join(text), tuple(zip(begins, ends, strict=True)), tuple(seams))


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
