"""Run mode ``chat``: a conversation in the terminal, whose answers appear as they grow."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

from mindllm.config import RunConfig
from mindllm.data import run_tokenizer
from mindllm.errors import UserError
from mindllm.generate.chat import Chat
from mindllm.generate.load import finding_weights, load_generator
from mindllm.generate.prompts import conversation_encoder
from mindllm.outside import half_surrogate
from mindllm.process.interrupts import interruptible
from mindllm.terminal.console import error_console, write

NEW, QUIT = ("clear", "new"), ("q", "quit", "exit")
HELP = "Write a message. clear or new: a new conversation; q, quit or exit: leave; Ctrl-C: stop an answer."


def chat(config: RunConfig) -> None:
    """Answer the lines of standard input on standard output until it ends or says so.

    Raises:
        UserError: no weights or weights that do not fit, or no tokenizer.
    """
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
        for line in _lines():
            command = line.strip().lower()
            if command in QUIT:
                break
            if command in NEW:
                conversation.clear()
                error_console.print("a new conversation")
            elif command:
                _write_answer(conversation, line)
    error_console.print(generator.speed.describe())


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no UTF-8 is told, and the next one is read
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if half_surrogate(line):
            error_console.print("this line is not UTF-8; write it again")
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
