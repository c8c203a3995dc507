"""Read messages of a conversation. All forms of rows use this reader, so that no form drops a key that another one has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindllm.errors import nearest, shortened
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
