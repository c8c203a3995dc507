"""Text as soon as it is whole: a token of a byte-level vocabulary may hold a part of a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``."""


class TextStream:
    """Turns the tokens after ``prompt`` into pieces of text, whose concatenation is their text.

    Text is decoded together with the tokens before it (the prompt, then those of the last piece): sentencepiece drops a
    space at the beginning, and decodes a run of byte tokens only as a whole.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._tokens = list(prompt)
        self._waiting = len(self._tokens)  # index of the first token whose text is not all written
        self._written = len(decoder.decode(self._tokens)) if self._tokens else 0  # characters of the text of _tokens

    def push(self, token: int) -> str:
        """Takes the next token; returns the text that is complete with it. Replacement characters wait for what follows."""
        self._tokens.append(token)
        text = self._decoder.decode(self._tokens)
        whole = text.rstrip(REPLACEMENT)
        piece = whole[self._written :]
        self._written += len(piece)
        if whole == text:
            self._tokens = self._tokens[self._waiting :]
            self._waiting = len(self._tokens)
            self._written = len(self._decoder.decode(self._tokens))
        return piece

    def finish(self) -> str:
        """Returns what still waits: replacement characters of bytes that became no character."""
        piece = self._decoder.decode(self._tokens)[self._written :]
        self._written += len(piece)
        return piece


def whole_text(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of ``tokens`` after ``prompt``."""
    stream = TextStream(decoder, prompt)
    return "".join(map(stream.push, tokens)) + stream.finish()
