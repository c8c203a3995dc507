"""A batch of sequences in the cache, from the host's side: arrays of tokens in, arrays of logits out.

A batch may keep its cache: of the next prompts only what no sequence holds yet goes through the model. Prompts that follow each
other often begin alike: the examples before the questions of a test, a question before its choices. Every sequence remembers
which tokens its cache is of; a prompt takes over the cache of the sequence that shares most with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from mindllm.config import ModelConfig
from mindllm.generate.graphs.cache import CachedDecoder, ScoringDecoder
from mindllm.generate.graphs.kept import KeptGraphs
from mindllm.generate.graphs.layer_cache import FirstOfCache, ReorderedCache
from mindllm.generate.graphs.library import library, supports
from mindllm.generate.graphs.native import LARGEST_BATCH, NativeDecoder
from mindllm.generate.prompts import CAPACITY_UNIT, NARROWEST, pieces
from mindllm.models import CausalLM, Kernels

WORTH_SHARING = 32  # tokens: of less it is quicker that every sequence computes it
LARGEST_LOGITS = 1 << 26  # numbers: of scored tokens times the vocabulary, 256 MB in fp32

Tokens = Sequence[int] | np.ndarray


class Session:
    """Holds ``batch`` sequences of at most ``capacity`` tokens, which is ``length`` rounded up.

    ``native`` allows kernels in C++ for decoding; without it, or where they cannot be built, the compiled cells do it. ``kept``:
    where graphs are loaded from that an earlier process has compiled.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        kernels: Kernels,
        batch: int,
        length: int,
        native: bool = True,
        kept: KeptGraphs | None = None,
    ) -> None:
        self.batch = batch
        self._kept = kept
        self.capacity = -(-length // CAPACITY_UNIT) * CAPACITY_UNIT
        self._vocab_size = config.vocab_size
        self._decoder = CachedDecoder(model, config, kernels, batch, self.capacity)
        self._decoder.set_train(False)
        fits = native and not kernels.fused and batch <= LARGEST_BATCH and supports(config, self.capacity)
        path = library() if fits else None
        self._native = NativeDecoder(self._decoder, config, path) if path else None
        self._reordered = ReorderedCache([layer.cache for layer in self._decoder.layers])
        self._compiled: set[int] = set()
        self._shape = (batch, self.capacity, str(path))

    def fits(self, batch: int, length: int) -> bool:
        """Returns whether this session can hold ``batch`` sequences of ``length`` tokens."""
        return self.batch == batch and self.capacity >= length

    def compile(self, longest: int) -> None:
        """Compiles what prompts of up to ``longest`` tokens need by running it once; what the cache held is overwritten."""
        widths = sorted({pieces(longest)[1], 1} - self._compiled, reverse=True)
        keeping = self._kept.compiling(*self._shape, *widths) if self._kept and widths else contextlib.nullcontext()
        with keeping:
            for width in widths:
                zeros = np.zeros((self.batch, width), np.int32)
                if width == 1:
                    self.decode(zeros[:, 0], zeros[:, 0])
                else:
                    self._forward(zeros, zeros, np.zeros(self.batch, np.int32))
                self._compiled.add(width)

    def forget(self) -> None:
        """Nothing is remembered of earlier prompts."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Fills the cache with the prompts, a piece of each at a time; logits ``[batch, vocab]`` after the last tokens."""
        count, width = pieces(max(map(len, prompts)))
        tokens = np.zeros((self.batch, count, width), np.int32)
        for row, prompt in zip(tokens.reshape(self.batch, -1), prompts, strict=True):
            row[: len(prompt)] = prompt
        ends = np.array([len(prompt) - 1 for prompt in prompts])
        logits = np.empty((self.batch, self._vocab_size), np.float32)
        for piece in range(count):
            positions = np.tile(np.arange(width) + piece * width, (self.batch, 1))
            last = np.arange(self.batch) * width + np.clip(ends - piece * width, 0, width - 1)
            result = self._forward(tokens[:, piece], positions, last)
            ends_here = ends // width == piece
            logits[ends_here] = result[ends_here]
        return logits

    def decode(self, tokens: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """Puts one token per sequence at its position; logits ``[batch, vocab]`` after it."""
        inputs = np.array(tokens)[:, None], np.array(positions)[:, None]
        if self._native is not None:
            return self._native(*map(tensor, inputs)).asnumpy()
        return self._forward(*inputs, np.arange(self.batch))

    def reorder(self, sources: np.ndarray) -> None:
        """Gives each sequence what the cache holds of sequence ``sources[row]``, int ``[batch]``."""
        if (sources != np.arange(self.batch)).any():
            self._reordered(tensor(sources))

    def _forward(self, *arrays: np.ndarray) -> np.ndarray:
        # Under the phase "increment" a cell runs what it compiled for that phase without walking through its sub-cells to
        # look whether the shapes are new, which takes as long as the graph of a small model.
        self._decoder.phase = "increment" if arrays[0].shape[1] == 1 else "predict"
        return self._decoder(*map(tensor, arrays)).asnumpy()


def tensor(array: np.ndarray) -> Tensor:
    """``array`` as int32, as the graphs take tokens and positions."""
    return Tensor(np.ascontiguousarray(array, np.int32))


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Number of tokens with which two sequences begin alike."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if differs.size else length


class PrefixSession(Session):
    """A :class:`Session` that prefills what is new of its prompts, and scores continuations of them.

    The last position of the cache is where padding is written: no token ever attends to it.
    """

    def __init__(
        self, model: CausalLM, config: ModelConfig, kernels: Kernels, batch: int, length: int, native: bool = True
    ) -> None:
        super().__init__(model, config, kernels, batch, length + 1, native)
        caches = [FirstOfCache(layer.cache) for layer in self._decoder.layers]
        self._first = CachedDecoder(model, config, kernels, 1, self.capacity, caches)
        self._first.set_train(False)
        self._scoring = ScoringDecoder(self._decoder)
        self._scoring.set_train(False)
        self._held = [np.zeros(0, np.int32)] * batch
        self._widest_scored = max(NARROWEST, LARGEST_LOGITS // (batch * config.vocab_size))
        self.computed = 0  # tokens that went through the model, padding left out

    def fits(self, batch: int, length: int) -> bool:
        """Returns whether this session can hold ``batch`` sequences of ``length`` tokens."""
        return super().fits(batch, length + 1)

    def compile(self, longest: int) -> None:
        """Nothing: how much of prompts is new is known when they come, and what they need is compiled then."""

    def forget(self) -> None:
        """The cache holds nothing any more: after its content, or the weights of the model, have changed."""
        self._held = [np.zeros(0, np.int32)] * self.batch

    def prefill(self, prompts: Sequence[Tokens]) -> np.ndarray:
        """Makes the cache that of ``prompts``; logits ``[batch, vocab]`` after their last tokens."""
        wanted = [np.asarray(prompt, np.int32) for prompt in prompts]
        self._compute_shared(wanted)
        starts = self._take_over(wanted)
        starts = np.minimum(starts, [len(prompt) - 1 for prompt in wanted])  # the last token gives the logits
        logits = np.empty((self.batch, self._vocab_size), np.float32)
        ends = np.array([len(prompt) for prompt in wanted]) - starts
        count, width = pieces(int(ends.max()))
        for piece in range(count):
            tokens, positions, _ = self._piece(wanted, starts + piece * width, width)
            last = np.arange(self.batch) * width + np.clip(ends - 1 - piece * width, 0, width - 1)
            result = self._forward(tokens, positions, last)
            ends_here = (ends - 1) // width == piece
            logits[ends_here] = result[ends_here]
        self._held = wanted
        self.computed += int(ends.sum())
        return logits

    def score(self, continuations: Sequence[Tokens]) -> list[tuple[float, bool]]:
        """Scores what follows the first token of each continuation of what was prefilled; that token itself is not scored.

        Returns its log-probability in nats, and whether each of its tokens is the most likely one. One continuation for each
        sequence; of a single token the answer is ``(0.0, True)``. The prompts stay in the cache.
        """
        wholes = [
            np.concatenate([held, np.asarray(following, np.int32)])
            for held, following in zip(self._held, continuations, strict=True)
        ]
        starts = np.array([len(held) for held in self._held])
        longest = max(len(continuation) for continuation in continuations) - 1
        sums, greedy = np.zeros(self.batch), np.ones(self.batch, bool)
        width = min(pieces(max(longest, 1))[1], 1 << (self._widest_scored.bit_length() - 1))
        for piece in range(-(-longest // width)):
            begins = starts + piece * width
            tokens, positions, present = self._piece([whole[:-1] for whole in wholes], begins, width)
            following, _, _ = self._piece(wholes, begins + 1, width)
            logprobs, likeliest = (
                item.asnumpy() for item in self._scoring(tensor(tokens), tensor(positions), tensor(following))
            )
            sums += np.where(present, logprobs, 0.0).sum(axis=1, dtype=np.float64)
            greedy &= (~present | (likeliest == following)).all(axis=1)
            self.computed += int(present.sum())
        return [(float(total), bool(sure)) for total, sure in zip(sums, greedy, strict=True)]

    def decode(self, tokens: Tokens, positions: Tokens) -> np.ndarray:
        """As :meth:`Session.decode`; a sequence holds its prompt up to where something else is written."""
        self._held = [held[:position] for held, position in zip(self._held, positions, strict=True)]
        return super().decode(tokens, positions)

    def reorder(self, sources: np.ndarray) -> None:
        """As :meth:`Session.reorder`."""
        self._held = [self._held[source] for source in sources]
        super().reorder(sources)

    def _compute_shared(self, wanted: Sequence[np.ndarray]) -> None:
        """What all ``wanted`` begin with and no sequence holds goes through the model once, if it is long."""
        shared = min(common_prefix(wanted[0], other) for other in wanted)
        known = [common_prefix(held, wanted[0][:shared]) for held in self._held]
        source, start = int(np.argmax(known)), max(known)
        if self.batch == 1 or shared - start < WORTH_SHARING:
            return
        if source:
            self.reorder(np.array([source, *range(1, self.batch)]))
        head = wanted[0][:shared]
        count, width = pieces(shared - start)
        for piece in range(count):
            tokens, positions, _ = self._piece([head], np.array([start + piece * width]), width)
            self._first(*map(tensor, (tokens, positions, np.zeros(1, np.int32))))
        self._held[0] = head
        self.computed += shared - start

    def _take_over(self, wanted: Sequence[np.ndarray]) -> np.ndarray:
        """Gives every sequence the cache that begins most like what is wanted there; how many tokens it holds of that."""
        known = np.array([[common_prefix(held, prompt) for held in self._held] for prompt in wanted])
        rows = np.arange(self.batch)
        best = known.argmax(axis=1)
        sources = np.where(known[rows, rows] == known[rows, best], rows, best)
        self.reorder(sources)
        return known[rows, sources]

    def _piece(self, rows: Sequence[np.ndarray], begins: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        """``width`` tokens of each row from ``begins`` on, their positions, and which of them are not padding."""
        tokens = np.zeros((len(rows), width), np.int32)
        places = begins[:, None] + np.arange(width)
        present = places < np.array([len(row) for row in rows])[:, None]
        for line, row, begin in zip(tokens, rows, begins, strict=True):
            part = row[begin : begin + width]
            line[: len(part)] = part
        return tokens, np.where(present, places, self.capacity - 1), present
