"""Results as text for people, or as JSON Lines for programs: on standard output, or in a file that is whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig
from mindllm.files import atomic_open
from mindllm.generate.choosing.growing import Continuation
from mindllm.generate.requests import Request, is_json_lines
from mindllm.generate.terminal import terminal, write

Writer = Callable[[Request, Sequence[Continuation]], None]


@contextmanager
def open_results(config: RunConfig) -> Iterator[Writer]:
    """Yields the function that writes the continuations of a request.

    JSON Lines where they were asked for by ``save_file`` or came as ``input_data``. Raises UserError when the file cannot be.
    """
    if not config.save_file:
        yield _write_json_line if is_json_lines(config) else _write_text
        return
    path = Path(config.save_file)
    if path.is_dir():
        raise config.error("save_file", f"{path} is a directory; write the name of a file in it")
    try:
        with atomic_open(path) as file:
            yield lambda request, continuations: _print_json(file.write, request, continuations)
    except OSError as error:
        raise config.error("save_file", f"{path} cannot be written ({error.strerror})") from error
    terminal.print(f"results: {path}")


def record(request: Request, continuations: Sequence[Continuation]) -> dict[str, Any]:
    """What the request had, and ``continuations``: text, tokens, finish_reason, and where asked for logprobs and score."""
    return {**request.fields, "continuations": [_fields(continuation) for continuation in continuations]}


def _fields(continuation: Continuation) -> dict[str, Any]:
    fields = {"text": continuation.text, "finish_reason": continuation.finish_reason, "tokens": continuation.tokens}
    optional = {"logprobs": continuation.logprobs, "score": continuation.score}
    return fields | {name: value for name, value in optional.items() if value is not None}


def _print_json(put: Callable[[str], Any], request: Request, continuations: Sequence[Continuation]) -> None:
    put(json.dumps(record(request, continuations), ensure_ascii=False) + "\n")


def _write_json_line(request: Request, continuations: Sequence[Continuation]) -> None:
    _print_json(write, request, continuations)


def _write_text(request: Request, continuations: Sequence[Continuation]) -> None:
    for continuation in continuations:
        write(f"{request.prompt}{continuation.text}\n\n")
