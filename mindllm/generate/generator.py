"""Continues prompts with a model: the prompts of a batch through prefill, then a token of each per step, until all end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mindllm.config import ModelConfig
from mindllm.config.dataset import GenerationConfig
from mindllm.data.tokenizer import Tokenizer
from mindllm.errors import RunFailed, UserError
from mindllm.generate.prompts import check_prompts, encode_prompt, eos_ids
from mindllm.generate.sampling import draw, greedy, random_streams
from mindllm.generate.session import Session, pieces
from mindllm.generate.text_stream import TextStream
from mindllm.models import CausalLM, Kernels

FinishReason = Literal["eos", "length"]


@dataclass(frozen=True)
class Continuation:
    """What was written after one prompt; the end-of-sequence token is not part of ``tokens``."""

    tokens: list[int]
    finish_reason: FinishReason


@dataclass
class Speed:
    """Tokens and seconds, summed over calls: of prompts, of what was written, and of compiling."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    compile_s: float = 0.0


@dataclass
class _Row:
    """One sequence while it grows: ``cached`` tokens of it are in the cache, ``last`` is the newest and not among them."""

    cached: int
    last: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Generator:
    """Generates with the weights ``model`` has at the time of the call.

    Arguments:
        model: the decoder with its head.
        model_config: what it was built from.
        tokenizer: ``stream`` needs one; it also names the end of sequence where ``model_config`` does not.
        max_length: most tokens of prompt and continuation together; ``model_config.seq_length`` if not given.
        device_target: the device the model was built for.
        native: decode with C++ kernels where they fit and can be built.
    """

    def __init__(
        self,
        model: CausalLM,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        max_length: int | None = None,
        device_target: str = "CPU",
        native: bool = True,
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_length = max_length or model_config.seq_length
        self.eos_ids = eos_ids(model_config, tokenizer)
        self.speed = Speed()
        self._kernels = Kernels.choose(model_config, device_target)
        self._native = native
        self._session: Session | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], options: GenerationConfig, seed: int = 0
    ) -> list[Continuation]:
        """Continues prompts of token ids in one batch, whatever their lengths; results in the order of the prompts.

        Arguments:
            options: the section ``generation``.
            seed: of the draws, where ``options.seed`` is null.

        Raises:
            UserError: a prompt is empty, has a token outside of the vocabulary, or is too long.
            RunFailed: the model gives logits that are not finite.
        """
        return [result for batch in self.generate_in_batches(prompts, options, len(prompts), seed) for result in batch]

    def generate_in_batches(
        self, prompts: Sequence[Sequence[int]], options: GenerationConfig, batch_size: int, seed: int = 0
    ) -> Iterator[list[Continuation]]:
        """Like ``generate``, yielding the results of ``batch_size`` prompts after the other; draws do not depend on it."""
        check_prompts(prompts, self.model_config, self.max_length, options.max_new_tokens)
        streams = self._streams(prompts, options, seed)
        if prompts:
            self.prepare(min(batch_size, len(prompts)), max(map(len, prompts)), options.max_new_tokens)
        for start in range(0, len(prompts), batch_size or 1):
            batch = slice(start, start + batch_size)
            *_, rows = self._grow(prompts[batch], options, streams[batch])
            yield [Continuation(row.tokens, row.finish_reason or "length") for row in rows]

    def stream(self, prompt: str | Sequence[int], options: GenerationConfig, seed: int = 0) -> Iterator[str]:
        """Yields the continuation of one prompt in pieces, each as soon as its characters are whole. Errors as above."""
        if self.tokenizer is None:
            raise UserError("streaming text needs a tokenizer: give processor.tokenizer.vocab_file")
        tokens = encode_prompt(prompt, self.model_config, self.tokenizer) if isinstance(prompt, str) else list(prompt)
        text = TextStream(self.tokenizer, tokens)
        check_prompts([tokens], self.model_config, self.max_length, options.max_new_tokens)
        written = 0
        for (row,) in self._grow([tokens], options, self._streams([tokens], options, seed)):
            for token in row.tokens[written:]:
                if piece := text.push(token):
                    yield piece
            written = len(row.tokens)
        if piece := text.finish():
            yield piece

    def prepare(self, batch: int, longest: int, max_new_tokens: int) -> Session:
        """Compiles what continuing ``batch`` prompts of up to ``longest`` tokens needs, unless it is there."""
        count, width = pieces(longest)
        length = max(longest + max_new_tokens, count * width)
        start = time.perf_counter()
        if self._session is None or not self._session.fits(batch, length):
            self._session = None  # one cache at a time
            self._session = Session(self.model, self.model_config, self._kernels, batch, length, self._native)
        self._session.compile(longest)
        self.speed.compile_s += time.perf_counter() - start
        return self._session

    def _streams(
        self, prompts: Sequence[Sequence[int]], options: GenerationConfig, seed: int
    ) -> list[np.random.Generator]:
        return random_streams(prompts, seed if options.seed is None else options.seed)

    def _grow(
        self,
        prompts: Sequence[Sequence[int]],
        options: GenerationConfig,
        streams: Sequence[np.random.Generator],
    ) -> Iterator[list[_Row]]:
        """Yields the rows of the batch after prefill and after every step, until all are finished."""
        session = self.prepare(len(prompts), max(map(len, prompts)), options.max_new_tokens)
        rows = [_Row(cached=len(prompt)) for prompt in prompts]

        def take(logits: np.ndarray) -> None:
            for row, token in zip(rows, choose(logits, options, streams), strict=True):
                if row.finish_reason is None:
                    self._append(row, token, options.max_new_tokens)

        start = time.perf_counter()
        take(session.prefill(prompts))
        self.speed.prefill_s += time.perf_counter() - start
        self.speed.prefill_tokens += sum(map(len, prompts))
        yield rows
        while any(row.finish_reason is None for row in rows):
            start = time.perf_counter()
            growing = [row for row in rows if row.finish_reason is None]
            logits = session.decode([row.last for row in rows], [row.cached for row in rows])
            for row in growing:
                row.cached += 1
            take(logits)
            self.speed.decode_s += time.perf_counter() - start
            self.speed.decode_tokens += len(growing)
            yield rows

    def _append(self, row: _Row, token: int, max_new_tokens: int) -> None:
        if token in self.eos_ids:
            row.finish_reason = "eos"
            return
        row.tokens.append(token)
        row.last = token
        if len(row.tokens) == max_new_tokens:
            row.finish_reason = "length"


def choose(logits: np.ndarray, options: GenerationConfig, streams: Sequence[np.random.Generator]) -> list[int]:
    """The next token of every row of ``logits`` ``[batch, vocab]``; sampling takes one number of each row's stream."""
    if not np.isfinite(logits).all():
        raise RunFailed("the model gives logits that are not finite: its weights are damaged, or float16 overflows")
    if not options.do_sample:
        return [greedy(row) for row in logits]
    return [
        draw(row, stream.random(), options.temperature, options.top_k, options.top_p)
        for row, stream in zip(logits, streams, strict=True)
    ]
