"""Continues prompts with a model: the prompts of a batch through prefill, then a token of each per step, until all end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindllm.config import ModelConfig
from mindllm.config.generation import GenerationConfig
from mindllm.data.chat.instruction import end_ids
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError
from mindllm.generate.choosing.beam_search import BeamSearch, Finished
from mindllm.generate.choosing.growing import Continuation, GrowingSequence, require_finite, whole_text
from mindllm.generate.choosing.sampling import log_softmax, penalise, random_streams
from mindllm.generate.host import HostModel, HostSession
from mindllm.generate.prompts import check_prompts, pieces

if TYPE_CHECKING:  # MindSpore, which a model on the host does without
    from mindllm.generate.graphs.kept import KeptGraphs
    from mindllm.generate.session import Session
    from mindllm.models import CausalLM


@dataclass
class Speed:
    """Tokens and seconds, summed over calls: of prompts, of what was written, and of compiling."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    compile_s: float = 0.0

    def describe(self) -> str:
        """Return the speed as a line for people."""
        parts = [
            f"{name}: {tokens} tokens, {tokens / seconds:.1f} tokens/s"
            for name, tokens, seconds in (
                ("prefill", self.prefill_tokens, self.prefill_s),
                ("decode", self.decode_tokens, self.decode_s),
            )
            if seconds > 0
        ]
        return "; ".join([*parts, f"compilation: {self.compile_s:.1f} s"])


class Generator:
    """Generates with the weights ``model`` has at the time of the call.

    Arguments:
        model: the decoder with its head, as cells or as arrays on the host.
        model_config: what it was built from.
        tokenizer: streaming, stop strings and texts of results need one; it also names the end of sequence where
            ``model_config`` does not.
        max_length: most tokens of prompt and continuation together; ``model_config.seq_length`` if not given.
        device_target: the device the model was built for.
        native: decode with C++ kernels where they fit and can be built.
        shares_prefixes: what prompts have in common, with each other or with those before them, goes through the model once.
        kept: where compiled graphs are kept for the next process; not of those that share prefixes.
        chat_template: file of the chat template whose end marker ends an answer; empty: the tokenizer's own.
    """

    def __init__(
        self,
        model: CausalLM | HostModel,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        max_length: int | None = None,
        device_target: str = "CPU",
        native: bool = True,
        shares_prefixes: bool = False,
        kept: KeptGraphs | None = None,
        chat_template: str = "",
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_length = max_length or model_config.seq_length
        self.eos_ids = end_ids(model_config.eos_token_ids, tokenizer, chat_template)
        self.speed = Speed()
        self._device_target = device_target
        self._native = native
        self._shares_prefixes = shares_prefixes
        self._kept = kept
        self._session: Session | HostSession | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], options: GenerationConfig, seed: int = 0
    ) -> list[Continuation]:
        """Continues prompts of token ids in one batch, whatever their lengths; results in the order of the prompts.

        With ``options.num_return_sequences`` above 1, the continuations of a prompt follow each other, of beams the best first.

        Arguments:
            options: the section ``generation``.
            seed: of the draws, where ``options.seed`` is null.

        Raises:
            UserError: a prompt is empty, has a token outside of the vocabulary, or is too long; stop strings and no tokenizer.
            RunFailed: the model gives logits that are not finite.
        """
        return [result for batch in self.generate_in_batches(prompts, options, len(prompts), seed) for result in batch]

    def generate_in_batches(
        self, prompts: Sequence[Sequence[int]], options: GenerationConfig, batch_size: int, seed: int = 0
    ) -> Iterator[list[Continuation]]:
        """Like ``generate``, yielding the results of ``batch_size`` prompts after the other; draws do not depend on it."""
        self._check(prompts, options)
        if not prompts:
            return
        searches = options.num_beams > 1
        copies = 1 if searches else options.num_return_sequences
        prompts = [prompt for prompt in prompts for _ in range(copies)]
        streams = self._streams(prompts, options, seed)
        size = min(batch_size * copies, len(prompts))
        longest = max(map(len, prompts))
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            session = self.prepare(size, longest, options)
            if searches:
                yield self._search(session, batch, options)
            else:
                *_, sequences = self._grow(session, batch, options, streams[start : start + size])
                yield [sequence.result() for sequence in sequences]

    def stream(self, prompt: Sequence[int], options: GenerationConfig, seed: int = 0) -> Iterator[str]:
        """Yields the continuation of one prompt in pieces, each as soon as its characters are certain. Errors as above."""
        if self.tokenizer is None:
            raise UserError("streaming text needs a tokenizer: give processor.tokenizer.vocab_file")
        self._check([prompt], options)
        session = self.prepare(1, len(prompt), options)
        for (sequence,) in self._grow(session, [prompt], options, self._streams([prompt], options, seed)):
            if piece := sequence.take_text():
                yield piece

    def prepare(self, prompts: int, longest: int, options: GenerationConfig) -> Session | HostSession:
        """Compiles what continuing ``prompts`` prompts of up to ``longest`` tokens at once needs, unless it is there."""
        count, width = pieces(longest)
        start = time.perf_counter()
        session = self.session(prompts * options.num_beams, max(longest + options.max_new_tokens, count * width))
        session.compile(longest)
        self.speed.compile_s += time.perf_counter() - start
        return session

    def session(self, batch: int, length: int) -> Session | HostSession:
        """The cache of ``batch`` sequences of up to ``length`` tokens: the one there is, if it can hold them."""
        if self._session is None or not self._session.fits(batch, length):
            self._session = None  # one cache at a time
            self._session = self._new_session(batch, length)
        return self._session

    def _new_session(self, batch: int, length: int) -> Session | HostSession:
        if isinstance(self.model, HostModel):
            return HostSession(self.model, batch, length)
        from mindllm.generate.session import PrefixSession, Session
        from mindllm.models import Kernels

        kernels = Kernels.choose(self.model_config, self._device_target)
        if self._shares_prefixes:
            return PrefixSession(self.model, self.model_config, kernels, batch, length, self._native)
        return Session(self.model, self.model_config, kernels, batch, length, self._native, self._kept)

    def forget(self) -> None:
        """Nothing of earlier prompts is used any more: the weights of the model have changed."""
        if self._session is not None:
            self._session.forget()

    def _check(self, prompts: Sequence[Sequence[int]], options: GenerationConfig) -> None:
        check_prompts(prompts, self.model_config, self.max_length, options.max_new_tokens)
        if options.stops and self.tokenizer is None:
            raise UserError("generation.stop_strings needs a tokenizer: give processor.tokenizer.vocab_file")

    def _streams(
        self, prompts: Sequence[Sequence[int]], options: GenerationConfig, seed: int
    ) -> list[np.random.Generator]:
        return random_streams(prompts, seed if options.seed is None else options.seed)

    def _prefill(self, session: Session | HostSession, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Logits ``[rows, vocab]`` after prompts that may be fewer than the session has rows."""
        start = time.perf_counter()
        session.compile(max(map(len, prompts)))
        self.speed.compile_s += time.perf_counter() - start
        start = time.perf_counter()
        logits = session.prefill([*prompts, *[prompts[-1]] * (session.batch - len(prompts))])[: len(prompts)]
        require_finite(logits)
        self.speed.prefill_s += time.perf_counter() - start
        self.speed.prefill_tokens += sum(map(len, prompts))
        return logits

    def _grow(
        self,
        session: Session | HostSession,
        prompts: Sequence[Sequence[int]],
        options: GenerationConfig,
        streams: Sequence[np.random.Generator],
    ) -> Iterator[list[GrowingSequence]]:
        """Yields the sequences of the batch after prefill and after every step, until all have ended."""
        sequences = [
            GrowingSequence(prompt, options, stream, self.eos_ids, self.tokenizer)
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        tokens, positions = np.zeros((2, session.batch), np.int32)
        for sequence, logits in zip(sequences, self._prefill(session, prompts), strict=True):
            sequence.grow(logits)
        yield sequences
        while growing := [row for row, sequence in enumerate(sequences) if sequence.finish_reason is None]:
            start = time.perf_counter()
            for row in growing:
                tokens[row], positions[row] = sequences[row].last, sequences[row].cached
                sequences[row].cached += 1
            logits = session.decode(tokens, positions)
            require_finite(logits[growing])
            for row in growing:
                sequences[row].grow(logits[row])
            self._count_decoded(len(growing), start)
            yield sequences

    def _search(
        self, session: Session | HostSession, prompts: Sequence[Sequence[int]], options: GenerationConfig
    ) -> list[Continuation]:
        """The best sequences of every prompt; a prompt's beams are neighbouring rows of the session."""
        beams = options.num_beams
        searches = [BeamSearch(options, self.eos_ids) for _ in prompts]
        logits = self._prefill(session, [prompt for prompt in prompts for _ in range(beams)])
        tokens, positions = np.zeros((2, session.batch), np.int32)
        while open_searches := [index for index, search in enumerate(searches) if not search.done]:
            start = time.perf_counter()
            parents = np.arange(session.batch)
            for index in open_searches:
                rows = slice(index * beams, (index + 1) * beams)
                search, prompt = searches[index], prompts[index]
                parents[rows] = rows.start + _advance(search, logits[rows], prompt, options)
                tokens[rows] = [beam.tokens[-1] for beam in search.beams]
                positions[rows] = len(prompt) + len(search.beams[0].tokens) - 1
            if not all(search.done for search in searches):
                session.reorder(parents)
                logits = session.decode(tokens, positions)
                require_finite(logits)
            self._count_decoded(beams * len(open_searches), start)
        return [
            self._found(finished, prompt, options)
            for search, prompt in zip(searches, prompts, strict=True)
            for finished in search.results()
        ]

    def _found(self, finished: Finished, prompt: Sequence[int], options: GenerationConfig) -> Continuation:
        count = len(finished.beam.tokens) - finished.ended
        tokens = list(finished.beam.tokens[:count])
        text = whole_text(self.tokenizer, prompt, tokens) if self.tokenizer else ""
        logprobs = list(finished.beam.logprobs[:count]) if options.output_logprobs else None
        return Continuation(tokens, "eos" if finished.ended else "length", text, logprobs, finished.score)

    def _count_decoded(self, tokens: int, start: float) -> None:
        self.speed.decode_s += time.perf_counter() - start
        self.speed.decode_tokens += tokens


def _advance(search: BeamSearch, logits: np.ndarray, prompt: Sequence[int], options: GenerationConfig) -> np.ndarray:
    """A step of ``search`` with ``logits`` ``[num_beams, vocab]``; penalties are of the log-probabilities."""
    logprobs = log_softmax(logits)
    pairs = zip(logprobs, search.beams, strict=True)
    return search.advance(np.stack([penalise(row, prompt, beam.tokens, options) for row, beam in pairs]), logprobs)
