"""Trace the parts of a conversation through a chat template, and choose the form of tool calls that it expects.

A template ignores a key that it does not know, without an error. So each part that has to appear gets a numbered mark and the
conversation is rendered again. The numbers that are missing identify the parts that are lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mindllm.data.chat.conversations import REASONING, Message, is_learned, tool_name
from mindllm.data.chat.template_program import SEAM, TRACE

TRACED = re.compile(f"{TRACE}\\d+{TRACE}")


@dataclass(frozen=True)
class Part:
    """A part of a conversation that has to reach the text: its name in errors, and its own text."""

    name: str
    text: str


class Tracer:
    """Copies of messages and tools in which each part has a mark with its number in ``parts``."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        self.parts: list[Part] = []
        self.tools = None if tools is None else [self._tool(tool, f"tool {tool_name(tool)}") for tool in tools]
        self.messages = [self._message(message, f"messages[{at}]") for at, message in enumerate(messages)]

    def lost(self, text: str) -> list[str]:
        """Return the names of the parts whose marks are not in ``text``, which is made of these copies."""
        return [part.name for number, part in enumerate(self.parts) if f"{TRACE}{number}{TRACE}" not in text]

    def absent(self, text: str) -> list[str]:
        """Return the names of the parts whose words are not in ``text``, which is made of the conversation itself."""
        forms = ((part, json.dumps(part.text, ensure_ascii=False)[1:-1]) for part in self.parts)
        return [part.name for part, escaped in forms if part.text not in text and escaped not in text]

    def _mark(self, text: str, name: str) -> str:
        """Return ``text`` with a mark in front of its last character that is not white space: templates strip the others."""
        if not text.strip():
            return text
        end = len(text.rstrip()) - 1
        number = len(self.parts)
        self.parts.append(Part(name, text.strip().replace(SEAM, "")))
        return f"{text[:end]}{TRACE}{number}{TRACE}{text[end:]}"

    def _message(self, message: Message, place: str) -> Message:
        copy = dict(message)
        is_read_only = message["role"] == "assistant" and not is_learned(message)
        if isinstance(message.get("content"), str) and not is_read_only:
            copy["content"] = self._mark(message["content"], f"content of {place} ({message['role']})")
        if isinstance(reasoning := message.get(REASONING[0]), str) and not is_read_only:
            marked = self._mark(reasoning, f"{REASONING[0]} of {place}")
            copy |= {key: marked for key in REASONING if message.get(key) == reasoning}
        if message.get("tool_calls"):
            calls = message["tool_calls"]
            copy["tool_calls"] = [self._call(call, f"call of {tool_name(call)} in {place}") for call in calls]
        return copy

    def _call(self, call: Message, name: str) -> Message:
        """Return a call with marks; an id that holds its name has the mark, too, as some templates write the id alone."""
        number, copy = len(self.parts), self._tool(call, name)
        called = str(call.get("id", ""))
        if tool_name(call) in called:
            copy["id"] = f"{called[:-1]}{TRACE}{number}{TRACE}{called[-1:]}"
        return copy

    def _tool(self, tool: Any, name: str) -> Any:
        """Return a tool or a call with marks in its name and its arguments."""
        if isinstance(tool.get("function"), dict):
            return {**tool, "function": self._tool(tool["function"], name)}
        copy = dict(tool)
        if isinstance(tool.get("name"), str):
            copy["name"] = self._mark(tool["name"], name)
        arguments = tool.get("arguments")
        if isinstance(arguments, str):
            copy["arguments"] = self._mark(arguments, f"arguments of the {name}")
        if isinstance(arguments, dict):
            copy["arguments"] = dict(self._argument(*item, name) for item in arguments.items())
        return copy

    def _argument(self, key: str, value: Any, call: str) -> tuple[str, Any]:
        """Return an argument with a mark in its text, or in its key where it has none."""
        name = f"argument {key} of the {call}"
        return (
            (key, self._mark(value, name))
            if isinstance(value, str) and value.strip()
            else (self._mark(key, name), value)
        )


def without_traces(text: str) -> str:
    """Return a text without the marks of a tracer."""
    return TRACED.sub("", text)


def border(prefix: str, text: str) -> int | None:
    """Return the position in ``text`` where ``prefix`` ends, not counting marks; None if it cannot be determined exactly.

    Both are traced renderings: ``text`` of a conversation, ``prefix`` of its first messages. The template may write them
    differently, but what follows the last mark of ``prefix`` has to follow the same mark in ``text``.
    """
    marks = list(TRACED.finditer(prefix))
    if not marks:
        return None
    last = marks[-1]
    ends = [mark.end() for mark in TRACED.finditer(text) if mark.group() == last.group()]
    tail = prefix[last.end() :]
    if len(ends) != sum(mark.group() == last.group() for mark in marks) or not text.startswith(tail, ends[-1]):
        return None
    return len(without_traces(text[: ends[-1]])) + len(tail)


def call_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the forms in which templates expect messages with calls, the usual one first.

    Arguments are objects for most templates and JSON text for some. A content that is null marks a call for some templates;
    others write it as ``None``, and expect no content or an empty one.
    """
    contents: tuple[Message, ...] = ({"content": None}, {}, {"content": ""})
    tried: list[list[Message]] = []
    for is_text, content in product((False, True), contents):
        form = [_with_form(message, is_text, content) for message in messages]
        if form not in tried:
            tried.append(form)
            yield form


def is_python_text(text: str, messages: Sequence[Message]) -> bool:
    """Return True if a text writes a null content as ``None``, or the arguments of a call as Python writes a dictionary."""
    functions = [call.get("function", call) for message in messages for call in message.get("tool_calls", ())]
    arguments = [function.get("arguments") for function in functions]
    if any(isinstance(value, dict) and value and str(value) in text for value in arguments):
        return True
    has_null = any(message.get("content", "") is None for message in messages)
    return has_null and text.count("None") > json.dumps(messages, default=str).count("None")


def _with_form(message: Message, is_text: bool, content: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [_with_text(call) for call in message["tool_calls"]] if is_text else message["tool_calls"]
    if message["content"] is not None:
        return {**message, "tool_calls": calls}
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {"role": message["role"], **content, **rest, "tool_calls": calls}


def _with_text(call: Message) -> Message:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, dict) else call
