"""Rows of instruction files as conversations: one small function per form of row.

Beside the three common forms stand those that ModelLink's ``--handler-name`` knows, under its names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindllm.data.records import Record
from mindllm.errors import UserError, nearest

Message = dict[str, Any]
Reader = Callable[[Record], Iterable[Message]]
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """What was said: messages with a ``role`` of ROLES and a text ``content``, and the tools that were at hand."""

    messages: tuple[Message, ...]
    tools: list[Any] | None = None


def conversation_of(record: Record, handler: str, place: str) -> Conversation:
    """Returns the conversation in ``record``, read as ``handler`` says; ``place`` names the record in errors.

    Raises UserError where keys are missing, a role is unknown, or the assistant says nothing.
    """
    if handler == "auto":
        handler = detect(record, place)
    if handler not in HANDLERS:
        raise UserError(f"handler '{handler}' does not exist{nearest(handler, HANDLERS)}")
    messages = messages_of(record, HANDLERS[handler], f"handler {handler}", place)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{place}: the assistant says nothing, so there is nothing to learn; remove the row")
    return Conversation(messages, record.get("tools") or None)


def messages_of(record: Record, read: Reader, reader: str, place: str) -> tuple[Message, ...]:
    """What ``read`` makes of a record, checked; ``reader`` names it in errors. Raises UserError as :func:`conversation_of`."""
    try:
        return tuple(_checked(message) for message in read(record))
    except KeyError as error:
        raise UserError(f"{place}: has no key {error} that {reader} reads; its keys: {', '.join(record)}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{place}: not a row for {reader} ({error})") from None


def detect(record: Record, place: str) -> str:
    """Returns the form of a row by its keys: messages, sharegpt or alpaca."""
    for handler, keys in (
        ("messages", {"messages"}),
        ("sharegpt", {"conversations"}),
        ("alpaca", {"instruction", "output"}),
    ):
        if keys <= record.keys():
            return handler
    raise UserError(
        f"{place}: of no known form (keys: {', '.join(record)}); handler: auto wants messages, conversations, or "
        f"instruction and output. Name the handler: {', '.join(HANDLERS)}"
    )


def alpaca(record: Record) -> Iterable[Message]:
    """``instruction``, ``input`` (may be empty) and ``output``; perhaps ``system`` and ``history``, pairs of earlier turns."""
    yield from _system(record)
    for asked, answered in record.get("history") or []:
        yield from _turn(asked, answered)
    asked = record["instruction"]
    if record.get("input"):
        asked = f"{asked}\n{record['input']}"
    yield from _turn(asked, record["output"])


SHAREGPT_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
}


def sharegpt(record: Record) -> Iterable[Message]:
    """``conversations``: a list of ``from`` (human, gpt, system, ...) and ``value``; perhaps ``system``."""
    yield from _system(record)
    for turn in record["conversations"]:
        yield sharegpt_turn(turn)


def sharegpt_turn(turn: Mapping[str, Any]) -> Message:
    """``from`` and ``value``, or ``role`` and ``content``."""
    speaker = turn["from"] if "from" in turn else turn["role"]
    if speaker not in SHAREGPT_ROLES:
        raise ValueError(f"unknown speaker '{speaker}'{nearest(str(speaker), SHAREGPT_ROLES)}")
    return {"role": SHAREGPT_ROLES[speaker], "content": turn["value"] if "value" in turn else turn["content"]}


def messages(record: Record) -> Iterable[Message]:
    """``messages``: a list of ``role`` and ``content``, as OpenAI's interface has it; other keys reach the chat template."""
    return [{key: value for key, value in message.items() if value is not None} for message in record["messages"]]


SPEAKER = re.compile(r"^(Human|Assistant):", re.MULTILINE)


def belle(record: Record) -> Iterable[Message]:
    """Belle: ``instruction`` holds the turns so far behind "Human:" and "Assistant:", ``output`` the last answer."""
    before, *parts = SPEAKER.split(record["instruction"].rstrip())
    if before.strip() or not parts:
        raise ValueError('instruction does not begin with "Human:"')
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    if turns[-1][0] == "Assistant" and not turns[-1][1].strip():
        turns.pop()  # the place of the output
    for speaker, text in turns:
        yield {"role": "user" if speaker == "Human" else "assistant", "content": text.strip()}
    yield {"role": "assistant", "content": record["output"].strip()}


MOSS_MARKS = re.compile(r"<\|(Human|MOSS)\|>:\s?|<eo[hm]>")


def moss(record: Record) -> Iterable[Message]:
    """MOSS: ``chat`` holds turns, each with what "Human" and "MOSS" say between marks that are taken off."""
    for turn in record["chat"].values():
        if turn:
            yield from _turn(MOSS_MARKS.sub("", turn["Human"]).strip(), MOSS_MARKS.sub("", turn["MOSS"]).strip())


def leetcode_python(record: Record) -> Iterable[Message]:
    """leetcode-solutions-python: the problem before its code block; answered by the code and its explanation."""
    problem = record["code_with_problem"].split("```", maxsplit=1)[0].strip()
    return _turn(problem, f"{record['code_only']}\n{record['explanation_only']}")


def advertise_gen(record: Record) -> Iterable[Message]:
    """AdvertiseGen: ``content`` lists what a product is, ``summary`` praises it."""
    return _turn(record["content"], record["summary"])


HANDLERS: Mapping[str, Reader] = {
    "alpaca": alpaca,
    "sharegpt": sharegpt,
    "messages": messages,
    "GeneralInstructionHandler": alpaca,
    "BelleMultiTurnInstructionHandler": belle,
    "MOSSMultiTurnHandler": moss,
    "MOSSInstructionHandler": moss,
    "LeetcodePythonInstructionHandler": leetcode_python,
    "ADGenInstructionHandler": advertise_gen,
}


def _turn(asked: str, answered: str) -> tuple[Message, Message]:
    return {"role": "user", "content": asked}, {"role": "assistant", "content": answered}


def _system(record: Record) -> list[Message]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _checked(message: Message) -> Message:
    """The message with its content as text; an answer may be tool calls alone."""
    if message["role"] not in ROLES:
        raise ValueError(f"unknown role '{message['role']}'{nearest(str(message['role']), ROLES)}")
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        kinds = {part["type"] for part in content} - {"text"}
        if kinds:
            raise ValueError(f"content of type {', '.join(sorted(kinds))}: only text can be learnt")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"content of the {message['role']} is not text but {content!r}")
    return {**message, "content": content}
