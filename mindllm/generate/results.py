"""Results as JSON Lines for programs, also in a file that is whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig
from mindllm.files import atomic_open
from mindllm.generate.choosing.growing import Continuation
from mindllm.generate.requests import Request

Writer = Callable[[Request, Sequence[Continuation]], object]


@contextmanager
def saved(config: RunConfig) -> Iterator[Writer]:
    """Yield the function that writes the continuations of a request to ``save_file``, which is whole or absent.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(config.save_file)
    if path.is_dir():
        raise config.error("save_file", f"{path} is a directory; write the name of a file in it")
    try:
        with atomic_open(path) as file:
            yield lambda request, continuations: file.write(json_line(request, continuations))
    except OSError as error:
        raise config.error("save_file", f"{path} cannot be written ({error.strerror})") from error


def json_line(request: Request, continuations: Sequence[Continuation]) -> str:
    """Return the line of JSON Lines with what the request had and its continuations."""
    return json.dumps(record(request, continuations), ensure_ascii=False) + "\n"


def record(request: Request, continuations: Sequence[Continuation]) -> dict[str, Any]:
    """What the request had, and ``continuations``: text, tokens, finish_reason, and where asked for logprobs and score."""
    return {**request.fields, "continuations": [_fields(continuation) for continuation in continuations]}


def _fields(continuation: Continuation) -> dict[str, Any]:
    fields = {"text": continuation.text, "finish_reason": continuation.finish_reason, "tokens": continuation.tokens}
    optional = {"logprobs": continuation.logprobs, "score": continuation.score}
    return fields | {name: value for name, value in optional.items() if value is not None}
