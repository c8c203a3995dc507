"""Run mode ``chat``: a conversation in the terminal, whose answers appear as they grow."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

from mindllm.config import RunConfig
from mindllm.data import run_tokenizer
from mindllm.errors import UserError
from mindllm.generate.conversation import Encoder, Message, conversation_encoder
from mindllm.generate.generator import Generator
from mindllm.generate.load import load_generator, need_weights
from mindllm.generate.terminal import describe, terminal, write
from mindllm.outside import half_surrogate
from mindllm.process.interrupts import interruptible

NEW, QUIT = ("clear", "new"), ("q", "quit", "exit")
HELP = "Write a message. clear or new: a new conversation; q, quit or exit: leave; Ctrl-C: stop an answer."


class Chat:
    """A conversation: the messages so far, and the generator that answers."""

    def __init__(self, config: RunConfig, generator: Generator, encode: Encoder) -> None:
        self._config = config
        self._generator = generator
        self._encode = encode
        self.messages: list[Message] = []
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system prompt."""
        system = self._config.generation.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to ``text`` in pieces; what was yielded is remembered when the iteration ends or is left.

        Raises UserError when the conversation is too long to be answered; then the message is not remembered.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._encode(messages)
        room = self._generator.max_length - len(prompt)
        if room < 1:
            raise UserError(
                f"the conversation is longer than the {self._generator.max_length} tokens the model works on: clear it"
            )
        options = self._config.generation
        shortened = options.model_copy(update={"max_new_tokens": min(options.max_new_tokens, room)})
        pieces: list[str] = []
        try:
            for piece in self._generator.stream(prompt, shortened, self._config.seed):
                pieces.append(piece)
                yield piece
        finally:
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def chat(config: RunConfig) -> int:
    """Answers the lines of standard input on standard output until it ends or says so; returns the exit code.

    Raises UserError for no weights or weights that do not fit, and for no tokenizer.
    """
    need_weights(config)
    tokenizer = run_tokenizer(config)
    generator = load_generator(config, tokenizer)
    conversation = Chat(config, generator, conversation_encoder(config, tokenizer))
    with interruptible():
        _reserve(generator, config)
        terminal.print(HELP)
        for line in _lines():
            command = line.strip().lower()
            if command in QUIT:
                break
            if command in NEW:
                conversation.clear()
                terminal.print("a new conversation")
            elif command:
                _write_answer(conversation, line)
    terminal.print(describe(generator.speed))
    return 0


def _reserve(generator: Generator, config: RunConfig) -> None:
    """Makes room for the longest conversation at once: a larger cache would be compiled for anew."""
    with terminal.status("compiling"):
        longest = max(1, generator.max_length - config.generation.max_new_tokens)
        generator.prepare(1, longest, config.generation)


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
            terminal.print("this line is not UTF-8; write it again")
        else:
            yield line


def _write_answer(conversation: Chat, text: str) -> None:
    answer = conversation.answer(text)
    try:
        for piece in answer:
            write(piece)
    except UserError as error:
        terminal.print(str(error))
        return
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]
    write("\n")
