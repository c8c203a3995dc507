"""A batch of sequences in the cache, from the host's side: arrays of tokens in, arrays of logits out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from mindllm.config import ModelConfig
from mindllm.generate.graphs.cache import CachedDecoder
from mindllm.generate.graphs.layer_cache import ReorderedCache
from mindllm.generate.graphs.native import NativeDecoder, supports
from mindllm.generate.graphs.native_library import library
from mindllm.models import CausalLM, Kernels

NARROWEST, WIDEST = 16, 512  # tokens of a prompt that go through the model at once: powers of two between these
CAPACITY_UNIT = 128  # positions of the cache are a multiple, so that few lengths need a compilation of their own


def pieces(longest: int) -> tuple[int, int]:
    """Number and width of the pieces in which prompts of up to ``longest`` tokens go through the model."""
    width = NARROWEST
    while width < min(longest, WIDEST):
        width *= 2
    return -(-longest // width), width


class Session:
    """Holds ``batch`` sequences of at most ``capacity`` tokens, which is ``length`` rounded up.

    ``native`` allows kernels in C++ for decoding; without it, or where they cannot be built, the compiled cells do it.
    """

    def __init__(
        self, model: CausalLM, config: ModelConfig, kernels: Kernels, batch: int, length: int, native: bool = True
    ) -> None:
        self.batch = batch
        self.capacity = -(-length // CAPACITY_UNIT) * CAPACITY_UNIT
        self._vocab_size = config.vocab_size
        self._decoder = CachedDecoder(model, config, kernels, batch, self.capacity)
        self._decoder.set_train(False)
        path = library() if native and supports(config, kernels, batch, self.capacity) else None
        self._native = NativeDecoder(self._decoder, config, path) if path else None
        self._reordered = ReorderedCache([layer.cache for layer in self._decoder.layers])
        self._compiled: set[int] = set()

    def fits(self, batch: int, length: int) -> bool:
        """Returns whether this session can hold ``batch`` sequences of ``length`` tokens."""
        return self.batch == batch and self.capacity >= length

    def compile(self, longest: int) -> None:
        """Compiles what prompts of up to ``longest`` tokens need by running it once; what the cache held is overwritten."""
        for width in {pieces(longest)[1], 1} - self._compiled:
            zeros = np.zeros((self.batch, width), np.int32)
            if width == 1:
                self.decode(zeros[:, 0], zeros[:, 0])
            else:
                self._forward(zeros, zeros, np.zeros(self.batch, np.int32))
            self._compiled.add(width)

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
