"""Rows of instruction files as conversations: one function per form of row, and checks of messages.

Besides the three common forms, the forms of ModelLink's ``--handler-name`` are supported under its names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindllm.data.records import Record
from mindllm.errors import UserError, nearest, shortened
from mindllm.outside import parse_json

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
CALL = "function_call"  # LLaMA-Factory's speaker whose words are JSON of one call or several; OpenAI's older key of one call
SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function": "tool",
    CALL: "assistant",
}
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of the assistant's thoughts, in order of precedence. The first one is what templates read, gpt-oss reads the second."""
LOSS = ("weight", "loss")
"""Keys that say with 0 or false that a turn is read and not learned."""
OWN_KEYS = ("from", "value", "role", "content", "tool_calls", CALL)


def read_message(turn: Mapping[str, Any]) -> Message:
    """Return a turn as a message of Hugging Face's chat templates, with all keys that are not null.

    Accepts ``role`` and ``content`` as well as ``from`` and ``value``. The content is a text, or None where the assistant only
    calls tools. Arguments of calls are objects, also where the row has them as JSON text.

    Raises:
        KeyError, TypeError, ValueError: the turn has no speaker, no text, or an invalid key.
    """
    speaker, role = turn["from"] if "from" in turn else turn["role"], role_of(turn)
    content = turn["value"] if "value" in turn else turn.get("content")
    message = {key: value for key, value in turn.items() if key not in OWN_KEYS and value is not None}
    calls = _calls(turn, content) if role == "assistant" else []
    content = "" if speaker == CALL else _text(content, role, may_be_null=bool(calls))
    for key in LOSS:
        if key in message and (isinstance(message[key], str) or message[key] not in (0, 1)):
            raise ValueError(
                f"{key} of the {role} is {shortened(message[key])}; write 1 to learn the turn, 0 to only read it"
            )
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is not None:  # transformers fills both keys from either
        message = {"thinking": reasoning, **message, REASONING[0]: reasoning}
    return {"role": role, "content": content, **({"tool_calls": calls} if calls else {}), **message}


def role_of(turn: Mapping[str, Any]) -> str:
    """Return the role in ROLES of who speaks in a turn; raises KeyError or ValueError where nobody known does."""
    key = "from" if "from" in turn else "role"
    speaker = turn[key]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        kind = "speaker" if key == "from" else "role"
        raise ValueError(f"unknown {kind} '{shortened(speaker)}'{nearest(str(speaker), SPEAKERS)}")
    return SPEAKERS[speaker]


def is_learned(message: Message) -> bool:
    """Return True if the loss is computed on a message: the assistant's, unless its weight or loss is 0."""
    return message["role"] == "assistant" and all(message.get(key, 1) for key in LOSS)


def tool_name(tool: Any) -> str:
    """Return the name in a tool or a call, which may hold it under ``function``; empty where there is none."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


def read_tools(tools: Any) -> list[Any] | None:
    """Return tools as a list of objects; the list, or a tool in it, may be JSON text. None where there are none.

    Raises:
        ValueError: it is neither.
    """
    tools = parse_json(tools) if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return None
    read = (
        [parse_json(tool) if isinstance(tool, str) else tool for tool in tools] if isinstance(tools, list) else [tools]
    )
    wrong = next((tool for tool in read if not isinstance(tool, dict)), None)
    if wrong is not None:
        raise ValueError(f"a tool is an object, not {shortened(wrong)}")
    return read


def _calls(turn: Mapping[str, Any], content: Any) -> list[Message]:
    """Return the calls of a turn: those under ``tool_calls``, the older ``function_call``, or the words of CALL."""
    if turn.get("from", turn.get("role")) == CALL:
        called = parse_json(content)
        calls = [{"type": "function", "function": call} for call in (called if isinstance(called, list) else [called])]
    elif turn.get(CALL):
        calls = [{"type": "function", "function": turn[CALL]}]
    else:
        calls = turn.get("tool_calls") or []
        calls = parse_json(calls) if isinstance(calls, str) else calls
    if not isinstance(calls, list) or not all(map(tool_name, calls)):
        raise ValueError(f"tool_calls is not a list of calls with names: {shortened(calls)}")
    return [_with_object(call) for call in calls]


def _with_object(call: Message) -> Message:
    """Return a call whose arguments are an object: JSON text of one would be written as a text inside of JSON."""
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = parse_json(arguments)
    except ValueError:
        return dict(call)
    return {**call, "arguments": parsed} if isinstance(parsed, dict) else dict(call)


def _text(content: Any, role: str, may_be_null: bool) -> str | None:
    """Return the text of a content; a list holds the text in parts."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {str(part["type"]) for part in content} - {"text"}
        if kinds:
            raise ValueError(f"content of type {', '.join(sorted(kinds))}: only text can be learnt")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and may_be_null):
        raise ValueError(f"content of the {role} is not text but {shortened(repr(content))}")
    return content


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


def read_conversation(record: Record, handler: str, place: str) -> Conversation:
    """Return the conversation in ``record``, read by ``handler``; ``place`` names the record in errors.

    Raises UserError for missing keys, an unknown role, or an assistant without text.
    """
    if handler == "auto":
        handler = detect(record, place)
    if handler not in HANDLERS:
        raise UserError(f"handler '{handler}' does not exist{nearest(handler, HANDLERS)}")
    messages = messages_of(record, HANDLERS[handler], f"handler {handler}", place)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{place}: the assistant has no text to learn from; remove the row")
    if not any(map(is_learned, messages)):
        raise UserError(f"{place}: weight or loss of every turn of the assistant is 0; remove the row")
    return Conversation(messages, tools_of(record, place), variables_of(record, place))


def tools_of(record: Record, place: str) -> list[Any] | None:
    """Return the tools of a record, or None; raise UserError if they are not a list of objects."""
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
    """Return the messages that ``read`` yields of a record; ``reader`` names it in errors, as :func:`read_conversation`."""
    if media := next((key for key in MEDIA if record.get(key)), None):
        raise UserError(f"{place}: {media}: only text can be learnt; remove the row")
    try:
        return tuple(map(read_message, read(record)))
    except KeyError as error:
        raise UserError(f"{place}: has no key {error} that {reader} reads; its keys: {', '.join(record)}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{place}: not a row for {reader} ({error})") from None


def detect(record: Record, place: str) -> str:
    """Return the form of a row by its keys: messages, sharegpt, alpaca or prompt."""
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
    """Return turns from ``instruction``, ``input`` (may be empty) and ``output``; optionally ``system`` and ``history``,
    earlier turns.
    """
    yield from earlier(record)
    yield from _turn(instructed(record), record["output"])


def instructed(record: Record) -> str:
    """Return ``instruction``, followed by ``input`` if there is one."""
    return f"{record['instruction']}\n{record['input']}" if record.get("input") else record["instruction"]


def prompt(record: Record) -> Iterable[Mapping[str, Any]]:
    """Return turns from a key of ASKED and a key of ANSWERED: texts, messages or lists; optionally ``system`` and ``history``."""
    yield from earlier(record)
    yield from turns_of(first_of(record, ASKED), "user")
    yield from turns_of(first_of(record, ANSWERED), "assistant")


def first_of(record: Record, keys: Iterable[str]) -> Any:
    """Return the value of the first of ``keys`` in a record; raise KeyError if it has none."""
    key_found = next((key for key in keys if key in record), None)
    if key_found is None:
        raise KeyError(" or ".join(keys))
    return record[key_found]


def turns_of(value: Any, role: str) -> list[Mapping[str, Any]]:
    """Return the turns of a value: a text has the role ``role``; messages have their own roles."""
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
    """Return ``system`` and ``history``, pairs of earlier turns, of a record."""
    if record.get("system"):
        yield {"role": "system", "content": record["system"]}
    for question, answered in record.get("history") or []:
        yield from _turn(question, answered)


def sharegpt(record: Record) -> Iterable[Mapping[str, Any]]:
    """Return turns from ``conversations``: a list of ``from`` (human, gpt, system, ...) and ``value``; optionally ``system``."""
    yield from earlier(record)
    yield from listed_turns(record["conversations"])


def messages(record: Record) -> Iterable[Mapping[str, Any]]:
    """Return ``messages``: a list of ``role`` and ``content`` as in OpenAI's API; other keys are passed to the chat template."""
    return listed_turns(record["messages"])


SPEAKER = re.compile(r"^(Human|Assistant):", re.MULTILINE)


def belle(record: Record) -> Iterable[Message]:
    """Return the turns of Belle: ``instruction`` has turns with "Human:" and "Assistant:", ``output`` the last answer."""
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
    """Return the turns of MOSS: ``chat`` has turns of "Human" and "MOSS" between marks, which are removed."""
    for turn in record["chat"].values():
        if turn:
            yield from _turn(MOSS_MARKS.sub("", turn["Human"]).strip(), MOSS_MARKS.sub("", turn["MOSS"]).strip())


def leetcode_python(record: Record) -> Iterable[Message]:
    """Return the turns of leetcode-solutions-python: the problem, then code and its explanation."""
    problem = record["code_with_problem"].split("```", maxsplit=1)[0].strip()
    return _turn(problem, f"{record['code_only']}\n{record['explanation_only']}")


def advertise_gen(record: Record) -> Iterable[Message]:
    """Return the turns of AdvertiseGen: ``content`` lists product properties, ``summary`` is the advertisement."""
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


def _turn(question: str, answered: str) -> tuple[Message, Message]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answered}
