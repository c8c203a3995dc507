"""Run modes ``predict`` and ``chat`` in the terminal: continuations and conversations of a run."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.errors import UserError
from mindllm.process.interrupts import interruptible
from mindllm.terminal.console import error_console, write

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.generate.chat import Chat
    from mindllm.generate.choosing.growing import Continuation
    from mindllm.generate.generator import Generator
    from mindllm.generate.predict import Prompts, Writer
    from mindllm.generate.requests import Request

NEW, QUIT = ("clear", "new"), ("q", "quit", "exit")
HELP = "Write a message. clear or new: new conversation; q, quit or exit: leave; Ctrl-C: stop an answer."


def predict(config: RunConfig) -> None:
    """Continue the prompts of ``input_data``: stream a single one, process several in batches.

    Raises:
        UserError: weights, tokenizer or prompts are missing or invalid.
    """
    from mindllm.generate.load import finding_weights, load_generator
    from mindllm.generate.predict import read_prompts

    with finding_weights(config) as weights:
        prompts = read_prompts(config)
        with error_console.status("building the model"):
            generator = load_generator(config, prompts.tokenizer, weights.result())
    error_console.print(config.generation.describe())
    try:
        with interruptible():
            (_stream if prompts.is_streamed else _run_batches)(generator, prompts)
    finally:
        error_console.print(generator.speed.describe())


def _stream(generator: Generator, prompts: Prompts) -> None:
    config, tokens = prompts.config, prompts.tokens[0]
    with error_console.status("compiling"):
        generator.prepare(1, len(tokens), config.generation)
    try:
        if not config.generation.apply_chat_template:
            write(prompts.requests[0].prompt)
        for piece in generator.stream(tokens, config.generation, config.seed):
            write(piece)
    finally:
        write("\n")


def _run_batches(generator: Generator, prompts: Prompts) -> None:
    from mindllm.generate.predict import continued
    from mindllm.terminal.render import drawn

    with _writer(prompts.config) as write_answers, drawn() as progress:
        for request, continuations in continued(generator, prompts, progress):
            write_answers(request, continuations)


@contextmanager
def _writer(config: RunConfig) -> Iterator[Writer]:
    """Yield the function that writes the answers of a request: JSON Lines for ``save_file`` and for JSON Lines input."""
    from mindllm.generate.predict import json_line, saved
    from mindllm.generate.requests import is_json_lines

    def write_text(request: Request, continuations: Sequence[Continuation]) -> None:
        start = f"> {request.prompt}\n" if config.generation.apply_chat_template else request.prompt
        write("".join(f"{start}{continuation.text}\n\n" for continuation in continuations))

    if config.save_file:
        with saved(config) as write_saved:
            yield write_saved
        error_console.print(f"results: {Path(config.save_file)}")
    elif is_json_lines(config):
        yield lambda request, continuations: write(json_line(request, continuations))
    else:
        yield write_text


def chat(config: RunConfig) -> None:
    """Answer lines of standard input on standard output until it ends or the user quits.

    Raises:
        UserError: weights or tokenizer are missing or invalid.
    """
    from mindllm.data import run_tokenizer
    from mindllm.generate.chat import Chat
    from mindllm.generate.load import finding_weights, load_generator
    from mindllm.generate.prompts import conversation_encoder

    with finding_weights(config) as weights:
        tokenizer = run_tokenizer(config)
        encoder = conversation_encoder(config, tokenizer)
        with error_console.status("building the model"):
            generator = load_generator(config, tokenizer, weights.result())
    error_console.print(config.generation.describe())
    conversation = Chat(config, generator, encoder)
    with interruptible():
        with error_console.status("compiling"):
            conversation.prepare()
        error_console.print(HELP)
        for line in _input_lines():
            word = line.strip().lower()
            if word in QUIT:
                break
            if word in NEW:
                conversation.clear()
                error_console.print("new conversation")
            elif word:
                _write_answer(conversation, line)
    error_console.print(generator.speed.describe())


def _input_lines() -> Iterator[str]:
    from mindllm.outside import half_surrogate

    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # report a line that is not UTF-8, and continue
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if half_surrogate(line):
            error_console.print("the line is not valid UTF-8; write it again")
        else:
            yield line


def _write_answer(conversation: Chat, text: str) -> None:
    answer = conversation.answer(text)
    try:
        for piece in answer:
            write(piece)
    except UserError as error:
        error_console.print(str(error))
        return
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]
    write("\n")
