"""Chat templates: a conversation as the text a model was trained on, and which parts of it the assistant says.

A template is a program of the tokenizer's directory, run in jinja's immutable sandbox, where it sees the messages and the names
of special tokens, and no attribute or method that could reach further; and in a process of its own, which bounds its time and
memory. What the assistant says is found exactly or not at all: by the template's own ``{% generation %}`` marks, else by
rendering the conversation turn by turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.data.chat.conversations import Conversation, Message
from mindllm.data.chat.template_process import TemplateFailed, render_apart, render_here
from mindllm.data.chat.template_program import BEGIN, END
from mindllm.data.tokenizers.known import OWN_TEMPLATES
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError, shortened
from mindllm.families.hugging_face import read_json
from mindllm.gguf.header import gguf_file
from mindllm.outside import read_text

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
SEAM = "\ufdd0"  # one more of the noncharacters that mark places, beside BEGIN and END
OWN = {PLAIN, *OWN_TEMPLATES}  # the templates that need no other process
LONGEST_SOURCE = 1 << 20  # characters; the longest public templates have some ten thousand
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
        self._render = render_here if source in OWN else render_apart
        self.source = source
        self.has_marks = "{% generation" in source.replace("{%-", "{%")
        if len(source) > LONGEST_SOURCE:
            raise UserError(f"{origin}: not a chat template, it has {len(source):,} characters")
        try:
            self._render(source, [])
        except TemplateFailed as error:
            line = f", line {error.line}" if error.line is not None else ""
            raise UserError(f"{origin}: not a chat template{line}: {error}") from None

    def render(self, conversation: Conversation, place: str) -> RenderedChat:
        """Returns the text of ``conversation`` and what the assistant says; ``place`` names the row in errors.

        Raises UserError where the template refuses the conversation, or does not say exactly where a turn begins and ends.
        """
        messages = [self._spelled(message, place) for message in conversation.messages]
        if self.has_marks:
            (marked,) = self._fill([self._variables(messages, conversation.tools)], place)
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
        variables = self._variables(messages, conversation.tools, add_generation_prompt=True)
        return _without_marks(self._fill([variables], place)[0])

    def _by_turns(self, messages: list[Message], tools: list[Any] | None, place: str) -> str:
        """Renders up to each turn of the assistant and through it; both must be how the whole begins, or nobody could tell."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        before = [self._variables(messages[:index], tools, add_generation_prompt=True) for index in turns]
        through = [self._variables(messages[: index + 1], tools) for index in turns]
        whole, *parts = self._fill([self._variables(messages, tools), *before, *through], place)
        marked, done = "", 0
        for index, begin, end in zip(turns, parts[: len(turns)], parts[len(turns) :], strict=True):
            if not (end.startswith(begin) and whole.startswith(end) and len(begin) >= done):
                raise UserError(
                    f"{place}: {self.origin} writes turn {index} differently inside the conversation than at its end, so the "
                    "assistant's words cannot be told apart exactly. Mark them in the template with {% generation %} and "
                    "{% endgeneration %}, and name that file in train_dataset.data_loader.config.chat_template"
                )
            marked += whole[done : len(begin)] + BEGIN + whole[len(begin) : len(end)] + END
            done = len(end)
        return marked + whole[done:]

    def _variables(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> dict[str, Any]:
        own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return {**self._special_tokens, **own}

    def _fill(self, variables: list[dict[str, Any]], place: str) -> list[str]:
        try:
            return self._render(self.source, variables)
        except TemplateFailed as error:
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


def find_chat_template(
    directory: Path, special_tokens: Mapping[str, str], special_names: Sequence[str], given: str = "", own: str = ""
) -> ChatTemplate:
    """Returns the template in file ``given``, else that of the tokenizer's ``directory``, its ``own``, else a plain one.

    A directory has a ``chat_template.jinja``, or one in its ``tokenizer_config.json`` (of several: "default").
    """
    file = Path(given) if given else directory / "chat_template.jinja"
    if given and not file.is_file():
        raise UserError(f"{file}: no such chat template")
    if file.is_file():
        return ChatTemplate(_text(file), str(file), special_tokens, special_names)
    config = directory / "tokenizer_config.json"
    if source := _template_in(config) if config.is_file() else None:
        return ChatTemplate(source, f"chat_template of {config}", special_tokens, special_names)
    origin = "the chat template of its class" if own else "the plain chat template"
    return ChatTemplate(own or PLAIN, origin, special_tokens, special_names)


def chat_template_of(tokenizer: Tokenizer, given: str = "") -> ChatTemplate:
    """The template in file ``given``, else that of the tokenizer; errors as :class:`ChatTemplate`.

    A GGUF file has its own: what lies beside it belongs to others.
    """
    names = tokenizer.special_tokens, tokenizer.special_names
    if not given and tokenizer.chat_template and (gguf := gguf_file(tokenizer.path)):
        return ChatTemplate(tokenizer.chat_template, f"tokenizer.chat_template of {gguf}", *names)
    return find_chat_template(Path(tokenizer.path).parent, *names, given, tokenizer.chat_template)


def _text(file: Path) -> str:
    try:
        return read_text(file)
    except OSError as error:
        raise UserError(f"{file}: no chat template: {error.strerror}") from None


def _template_in(path: Path) -> str | None:
    found = read_json(path).get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        if "default" not in named:
            names = ", ".join(map(str, named)) or "none by name"
            raise UserError(f"{path}: chat_template: has {names} and no default; name a file in chat_template")
        found = named["default"]
    if found is not None and not isinstance(found, str):
        raise UserError(
            f"{path}: chat_template: must be a text, or a list of names and texts (value {shortened(found)})"
        )
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
