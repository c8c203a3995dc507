"""A conversation with a model: what was said, and answers that appear as they grow."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.generate.generator import Generator
from mindllm.generate.prompts import Conversation, Encoder, Message


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

    def prepare(self) -> None:
        """Compile for the longest conversation at once: a larger cache would be compiled for anew."""
        longest = max(1, self._generator.max_length - self._config.generation.max_new_tokens)
        self._generator.prepare(1, longest, self._config.generation)

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to ``text`` in pieces; what was yielded is remembered when the iteration ends or is left.

        Raises UserError when the conversation is too long to be answered; then the message is not remembered.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._encode(Conversation(tuple(messages)))
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
