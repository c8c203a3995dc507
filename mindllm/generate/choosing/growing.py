"""One sequence while it grows: which token comes next, what text it makes, and when it ends.

Its text streams as soon as it is whole: a token of a byte-level vocabulary may hold a part of a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from mindllm.config.generation import GenerationConfig
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import RunFailed
from mindllm.generate.choosing.sampling import draw, greedy, log_softmax, penalise

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet
# Text that ends at the first stop string, wherever the borders of the pieces it comes in lie.


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


class StopStrings:
    """Passes text on in pieces and holds back what may yet become a stop string.

    The stop string that is complete first ends the text, of those that end together the longest: the result does not depend
    on how the text was cut. ``found`` says that it has ended; what comes after is dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """Takes the next piece; returns the text that is certainly before any stop string."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        self.found, end = self._end(text)
        self._held = "" if self.found else text[end:]
        return text[:end]

    def finish(self) -> str:
        """Returns what is held back: with the text at its end it is the beginning of no stop string."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str) -> tuple[bool, int]:
        """Whether ``text`` has a stop string, and where what is before it, or before the beginning of one, ends."""
        starts = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if matches:
            return True, min(matches)[1]
        return False, len(text) - max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, the whole of it left out."""
    return next(size for size in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:size]))


FinishReason = Literal["eos", "length", "stop"]


@dataclass(frozen=True)
class Continuation:
    """What was written after a prompt.

    Arguments:
        tokens: without the end-of-sequence token; with those of a stop string.
        finish_reason: the end-of-sequence token, the length asked for, or a stop string.
        text: of the tokens, up to a stop string; empty without a tokenizer.
        logprobs: where asked for: the log-probability the model gave each token, in nats.
        score: of a beam search: log-probability of tokens and end of sequence, divided by their number ** length_penalty.
    """

    tokens: list[int]
    finish_reason: FinishReason
    text: str = ""
    logprobs: list[float] | None = None
    score: float | None = None


class GrowingSequence:
    """A prompt and what is written after it, by sampling or greedily.

    ``cached`` tokens of it are in the cache; ``last`` is the newest and not among them. ``pending`` is text that nobody took yet.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationConfig,
        stream: np.random.Generator,
        eos_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prompt = prompt
        self.cached = len(prompt)
        self.last = 0
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._options = options
        self._stream = stream
        self._eos_ids = eos_ids
        self._text = TextStream(tokenizer, prompt) if tokenizer else None
        self._stops = StopStrings(options.stops)
        self._pieces: list[str] = []
        self._taken = 0
        self._logprobs: list[float] = []

    def grow(self, logits: np.ndarray) -> None:
        """Chooses the next token from ``logits`` float32 ``[vocab]``, and ends if it is an end."""
        token = self._choose(logits)
        if token in self._eos_ids:
            self._finish("eos")
            return
        self.tokens.append(token)
        self.last = token
        if self._options.output_logprobs:
            self._logprobs.append(float(log_softmax(logits)[token]))
        if self._text:
            self._pieces.append(self._stops.push(self._text.push(token)))
        if self._stops.found:
            self._finish("stop")
        elif len(self.tokens) == self._options.max_new_tokens:
            self._finish("length")

    def take_text(self) -> str:
        """Returns the text that became certain since the last call."""
        text = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return text

    def result(self) -> Continuation:
        """What was written, of a sequence that has ended."""
        assert self.finish_reason is not None
        logprobs = self._logprobs if self._options.output_logprobs else None
        return Continuation(self.tokens, self.finish_reason, "".join(self._pieces), logprobs)

    def _choose(self, logits: np.ndarray) -> int:
        options = self._options
        scores = penalise(logits, self.prompt, self.tokens, options)
        if not options.do_sample:
            return greedy(scores)
        limits = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p}
        return draw(scores, self._stream.random(), temperature=options.temperature, **limits)

    def _finish(self, reason: FinishReason) -> None:
        if self._text:
            self._pieces.append(self._stops.push(self._text.finish()) + self._stops.finish())
        self.finish_reason = "stop" if self._stops.found else reason


def require_finite(logits: np.ndarray) -> None:
    """Raises RunFailed for logits of which nothing can be chosen."""
    if not np.isfinite(logits).all():
        raise RunFailed("the model gives logits that are not finite: its weights are damaged, or float16 overflows")
