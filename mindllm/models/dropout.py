"""Random numbers in training graphs: dropout (Srivastava et al., 2014), and noise on embeddings (NEFTune; Jain et al., 2023).

They are a function of random numbers in the batch, so that no state is saved. Every token has a random odd 32-bit number, its
key. Times the fixed odd number of a channel, modulo 2³², it is a number whose upper bits decide (multiply-shift
hashing; Dietzfelbinger et al., 1997). It is the same in every layout of the devices, when it is recomputed, and after a resume.
"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

NUMBERS = 2**32


def odd_numbers(count: int, salt: int) -> np.ndarray:
    """Return ``count`` odd int32 numbers, always equal for a ``salt``."""
    return np.random.default_rng(salt).integers(-(2**31), 2**31, count, dtype=np.int32) | np.int32(1)


class Keys(nn.Cell):
    """Keys of tokens ``[batch, seq]`` -> other keys, for the ``number``-th part of the model.

    They wait for ``x``, the input of that part. Otherwise the masks of all parts would be computed at the start of a step.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.factor = int(odd_numbers(1, number)[0])
        self.mul = P.Mul()

    def construct(self, keys: Tensor, x: Tensor) -> Tensor:
        return self.mul(P.depend(keys, x), self.factor)


def drawn_again(operator: P.Primitive, again: bool) -> P.Primitive:
    """Return an operator that computes a mask. With ``again`` the mask is recomputed from keys instead of saved."""
    return operator.recompute() if again else operator


class KeepMask(nn.Cell):
    """Random bits, int32 of any shape -> whether each is kept, which it is with probability ``1 - rate``."""

    def __init__(self, rate: float, again: bool = False) -> None:
        super().__init__()
        self.threshold = round(rate * NUMBERS) - NUMBERS // 2
        self.compare = drawn_again(P.GreaterEqual(), again)

    def construct(self, bits: Tensor) -> Tensor:
        return self.compare(bits, self.threshold)


class Drop(nn.Cell):
    """``x`` and random bits of its shape -> zeros, and the rest of ``x`` divided by ``1 - rate``."""

    def __init__(self, rate: float, again: bool = False) -> None:
        super().__init__()
        self.kept = KeepMask(rate, again)
        self.share_kept = 1.0 - rate
        self.cast = drawn_again(P.Cast(), again)
        self.mul = P.Mul()
        self.rescale = P.Div()  # no second Mul, whose names MindSpore 2.10 confuses

    def construct(self, x: Tensor, bits: Tensor) -> Tensor:
        return self.rescale(self.mul(x, self.cast(self.kept(bits), x.dtype)), self.share_kept)


class Dropout(nn.Cell):
    """Sets elements of ``x`` ``[tokens, width]`` to zero with probability ``rate``; ``salt`` distinguishes uses of the same keys.

    ``again``: the mask is recomputed for the gradient instead of saved.
    """

    def __init__(self, rate: float, width: int, salt: int, again: bool = False) -> None:
        super().__init__()
        self.channels = Tensor(odd_numbers(width, salt).reshape(1, width))
        self.reshape = P.Reshape()
        self.bits = drawn_again(P.Mul(), again)
        self.drop = Drop(rate, again)

    def construct(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Apply dropout. ``keys``: int32 ``[batch, seq]``, of the tokens of ``x`` in order; None disables it."""
        if keys is None:
            return x
        return self.drop(x, self.bits(self.reshape(keys, (-1, 1)), self.channels))


class EmbeddingNoise(nn.Cell):
    """Adds uniform noise of ``± alpha / sqrt(length · width)`` to ``x`` ``[tokens, width]``."""

    def __init__(self, alpha: float, length: int, width: int, salt: int) -> None:
        super().__init__()
        self.channels = Tensor(odd_numbers(width, salt).reshape(1, width))
        self.strength = alpha / math.sqrt(length * width) / (NUMBERS // 2)
        self.reshape = P.Reshape()
        self.bits = P.Mul()
        self.cast = P.Cast()
        self.scale = P.Mul()
        self.add = P.Add()

    def construct(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Add noise. ``keys``: int32 ``[batch, seq]``; None disables it."""
        if keys is None:
            return x
        bits = self.bits(self.reshape(keys, (-1, 1)), self.channels)
        return self.add(x, self.cast(self.scale(self.cast(bits, ms.float32), self.strength), x.dtype))


class AttentionDropout(nn.Cell):
    """Dropout of attention weights ``[batch, heads, q, k]`` by the keys of the queries."""

    def __init__(self, rate: float, heads: int, seq_length: int, salt: int, again: bool = False) -> None:
        super().__init__()
        numbers = odd_numbers(heads + seq_length, salt)
        self.heads = Tensor(numbers[:heads].reshape(1, heads, 1, 1))
        self.columns = Tensor(numbers[heads:].reshape(1, 1, 1, seq_length))
        self.reshape = P.Reshape()
        self.of_heads = P.Mul()
        self.bits = drawn_again(P.Mul(), again)
        self.drop = Drop(rate, again)

    def construct(self, weights: Tensor, keys: Tensor | None, columns: Tensor) -> Tensor:
        """Apply dropout. ``keys``: int32 ``[batch, q]``; ``columns``: the attribute ``columns`` of the attention keys."""
        if keys is None:
            return weights
        head_keys = self.of_heads(self.reshape(keys, (keys.shape[0], 1, -1, 1)), self.heads)
        return self.drop(weights, self.bits(head_keys, columns))
