"""Rows of instruction files as conversations: one small function per form of row.

Beside the three common forms stand those that ModelLink's ``--handler-name`` knows, under its names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindllm.data.chat.messages import Message, is_learned, read_message, read_tools
from mindllm.data.records import Record
from mindllm.errors import UserError, nearest
from mindllm.outside import parse_json

Reader = Callable[[Record], Iterable[Mapping[str, Any]]]
ASKED = ("prompt", "query", "question", "input")
ANSWERED = ("completion", "response", "answer", "output")
"""Keys of a row that is one question and its answer, in the order in which they are looked for."""
VARIABLES = "chat_template_kwargs"
MEDIA = ("images", "image", "videos", "video", "audios", "audio")


@dataclass(frozen=True)
class Conversation:
    """Messages as :func:`read_message` returns them, the tools at hand, and ``variables`` of the row for its template."""

    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


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
    if not any(map(is_learned, messages)):
        raise UserError(f"{place}: weight or loss of every turn of the assistant is 0; remove the row")
    return Conversation(messages, tools_of(record, place), variables_of(record, place))


def tools_of(record: Record, place: str) -> list[Any] | None:
    """Return the tools at hand in a record, None where there are none; raises UserError where they are no list of objects."""
    try:
        return read_tools(record.get("tools"))
    except ValueError as error:
        raise UserError(f"{place}: tools: not JSON of a list of tools ({error})") from None


def variables_of(record: Record, place: str) -> Mapping[str, Any]:
    """Return the variables that a record has for the template (``chat_template_kwargs``); raises UserError for no object."""
    variables = record.get(VARIABLES) or {}
    try:
        variables = parse_json(variables) if isinstance(variables, str) else variables
    except ValueError as error:
        raise UserError(f"{place}: {VARIABLES}: not JSON ({error})") from None
    if not isinstance(variables, dict):
        raise UserError(f"{place}: {VARIABLES}: not an object of names and values")
    return variables


def messages_of(record: Record, read: Reader, reader: str, place: str) -> tuple[Message, ...]:
    """Return the messages that ``read`` yields of a record; ``reader`` names it in errors, as :func:`conversation_of`."""
    if media := next((key for key in MEDIA if record.get(key)), None):
        raise UserError(f"{place}: {media}: only text can be learnt; remove the row")
    try:
        return tuple(map(read_message, read(record)))
    except KeyError as error:
        raise UserError(f"{place}: has no key {error} that {reader} reads; its keys: {', '.join(record)}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{place}: not a row for {reader} ({error})") from None


def detect(record: Record, place: str) -> str:
    """Returns the form of a row by its keys: messages, sharegpt, alpaca or prompt."""
    for handler, keys in (
        ("messages", {"messages"}),
        ("sharegpt", {"conversations"}),
        ("alpaca", {"instruction", "output"}),
    ):
        if keys <= record.keys():
            return handler
    if all(any(key in record for key in keys) for keys in (ASKED, ANSWERED)):
        return "prompt"
    raise UserError(
        f"{place}: of no known form (keys: {', '.join(record)}); handler: auto wants messages, conversations, "
        f"instruction and output, or prompt and completion. Name the handler: {', '.join(HANDLERS)}"
    )


def alpaca(record: Record) -> Iterable[Message]:
    """``instruction``, ``input`` (may be empty) and ``output``; perhaps ``system`` and ``history``, pairs of earlier turns."""
    yield from earlier(record)
    yield from _turn(instructed(record), record["output"])


def instructed(record: Record) -> str:
    """``instruction``, and ``input`` below it where there is one."""
    return f"{record['instruction']}\n{record['input']}" if record.get("input") else record["instruction"]


def prompt(record: Record) -> Iterable[Mapping[str, Any]]:
    """One of ASKED and one of ANSWERED: texts, messages or lists of them; perhaps ``system`` and ``history``."""
    yield from earlier(record)
    yield from turns_of(first_of(record, ASKED), "user")
    yield from turns_of(first_of(record, ANSWERED), "assistant")


def first_of(record: Record, keys: Iterable[str]) -> Any:
    """The value of the first of ``keys`` that a record has; raises KeyError where it has none."""
    found = next((key for key in keys if key in record), None)
    if found is None:
        raise KeyError(" or ".join(keys))
    return record[found]


def turns_of(value: Any, role: str) -> list[Mapping[str, Any]]:
    """Return the turns of a value: a text is said by ``role``; a message, or a list of them, says who speaks."""
    if isinstance(value, str | None):
        return [{"role": role, "content": value}]
    return [value] if isinstance(value, dict) else list(value)


def listed_turns(value: Any) -> list[Mapping[str, Any]]:
    """Return a list of turns; tables have it as JSON text."""
    turns = parse_json(value) if isinstance(value, str) else value
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("not a list of messages")
    return turns


def earlier(record: Record) -> Iterable[Message]:
    """``system`` and ``history``, pairs of earlier turns, where a record has them."""
    if record.get("system"):
        yield {"role": "system", "content": record["system"]}
    for asked, answered in record.get("history") or []:
        yield from _turn(asked, answered)


def sharegpt(record: Record) -> Iterable[Mapping[str, Any]]:
    """``conversations``: a list of ``from`` (human, gpt, system, ...) and ``value``; perhaps ``system``."""
    yield from earlier(record)
    yield from listed_turns(record["conversations"])


def messages(record: Record) -> Iterable[Mapping[str, Any]]:
    """``messages``: a list of ``role`` and ``content``, as OpenAI's interface has it; other keys reach the chat template."""
    return listed_turns(record["messages"])


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
    "prompt": prompt,
    "GeneralInstructionHandler": alpaca,
    "BelleMultiTurnInstructionHandler": belle,
    "MOSSMultiTurnHandler": moss,
    "MOSSInstructionHandler": moss,
    "LeetcodePythonInstructionHandler": leetcode_python,
    "ADGenInstructionHandler": advertise_gen,
}


def _turn(asked: str, answered: str) -> tuple[Message, Message]:
    return {"role": "user", "content": asked}, {"role": "assistant", "content": answered}
