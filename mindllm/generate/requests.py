"""What is to be continued: the texts of ``input_data``, the lines of a text file, or the objects of a JSON Lines file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig
from mindllm.data.chat.conversations import read_message, read_tools
from mindllm.errors import UserError
from mindllm.generate.prompts import Conversation
from mindllm.outside import half_surrogate, parse_json, read_text

FORMS = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True)
class Request:
    """A prompt or, of a JSON Lines file, a conversation; ``fields`` is the object it came from, which its result repeats."""

    prompt: str = ""
    conversation: Conversation | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def read_requests(config: RunConfig) -> list[Request]:
    """Everything that ``input_data`` asks for, empty lines left out.

    Raises:
        UserError: nothing is asked for, or a line of a ``.jsonl`` file is no request.
    """
    value = config.input_data
    if value is None:
        raise config.error("input_data", "run_mode predict needs a prompt: a text, a list of texts, or a file of lines")
    if is_json_lines(config):
        requests = list(_read_lines(Path(str(value)), _parse))
    elif isinstance(value, str) and _is_file(value):
        requests = list(_read_lines(Path(value), _plain))
    else:
        requests = [_plain(text) for text in ([value] if isinstance(value, str) else value)]
        if any(half_surrogate(request.prompt) for request in requests):
            raise config.error("input_data", "holds bytes that are not UTF-8; write the prompt in UTF-8")
    if not requests:
        raise config.error("input_data", "holds no prompt: give at least one")
    return requests


def is_json_lines(config: RunConfig) -> bool:
    """Whether ``input_data`` names a JSON Lines file. Raises UserError for one that does not exist."""
    value = config.input_data
    if not isinstance(value, str) or not value.endswith(".jsonl") or "\n" in value:
        return False
    if not _is_file(value):
        raise config.error("input_data", f"{value}: no such file")
    return True


def _read_lines(path: Path, parse: Callable[[str], Request]) -> Iterator[Request]:
    try:
        text = read_text(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield parse(line.rstrip("\r"))
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from error


def _plain(text: str) -> Request:
    return Request(text, fields={"prompt": text})


def _parse(line: str) -> Request:
    """A line of a JSON Lines file. Raises ValueError that says what is wrong with it."""
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); write {FORMS}") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise ValueError(f"neither a prompt nor a conversation; write {FORMS}")
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise ValueError(f"prompt is not a text (value {json.dumps(fields['prompt'])})")
        return Request(fields["prompt"], fields=fields)
    return Request(conversation=_conversation(fields), fields=fields)


def _conversation(fields: Mapping[str, Any]) -> Conversation:
    """Return the messages of a line with its tools and its variables of the template; raises ValueError for an invalid one."""
    values = fields["messages"]
    if not isinstance(values, list) or not values:
        raise ValueError(f"messages is not a list of at least one; write {FORMS}")
    messages = []
    for value in values:
        if not isinstance(value, dict) or "role" not in value:
            raise ValueError(
                f"a message is an object with a role and a content (value {json.dumps(value)}); write {FORMS}"
            )
        messages.append(read_message(value))
    variables = fields.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise ValueError(f"chat_template_kwargs is not an object (value {json.dumps(variables)})")
    return Conversation(tuple(messages), read_tools(fields.get("tools")), variables)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with a null character
        return False
