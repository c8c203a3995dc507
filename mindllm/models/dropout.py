"""What training draws in its graphs: dropout (Srivastava et al., 2014), and noise on embeddings (NEFTune; Jain et al., 2023).

It is a function of what tokens bring along, so nothing about it is kept. Every token has a random odd 32-bit number, its key.
Times the fixed odd number of a channel, modulo 2³², it is a number whose upper bits say what happens there (multiply-shift
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
    """``count`` odd int32 numbers, always the same for a ``salt``."""
    return np.random.default_rng(salt).integers(-(2**31), 2**31, count, dtype=np.int32) | np.int32(1)


class Keys(nn.Cell):
    """Keys of tokens ``[batch, seq]`` -> other keys of them, for the ``number``-th part of the model that needs some.

    They wait for ``x``, which that part is given: what is drawn by them would else be there for all parts as a step begins, as it
    needs nothing but the batch.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.factor = int(odd_numbers(1, number)[0])
        self.mul = P.Mul()

    def construct(self, keys: Tensor, x: Tensor) -> Tensor:
        return self.mul(P.depend(keys, x), self.factor)


def drawn_again(operator: P.Primitive, again: bool) -> P.Primitive:
    """An operator that makes a mask; its result is not kept for the gradient where it is computed ``again``, from a few keys."""
    return operator.recompute() if again else operator


class Kept(nn.Cell):
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
        self.kept = Kept(rate, again)
        self.share_kept = 1.0 - rate
        self.cast = drawn_again(P.Cast(), again)
        self.mul = P.Mul()
        self.rescale = P.Div()  # no second Mul, whose names MindSpore 2.10 confuses

    def construct(self, x: Tensor, bits: Tensor) -> Tensor:
        return self.rescale(self.mul(x, self.cast(self.kept(bits), x.dtype)), self.share_kept)


class Dropout(nn.Cell):
    """Of ``x`` ``[tokens, width]`` with probability ``rate`` zeros; ``salt`` sets it apart from others of the same keys.

    ``again``: the mask is drawn once more for the gradient in place of being kept.
    """

    def __init__(self, rate: float, width: int, salt: int, again: bool = False) -> None:
        super().__init__()
        self.channels = Tensor(odd_numbers(width, salt).reshape(1, width))
        self.reshape = P.Reshape()
        self.bits = drawn_again(P.Mul(), again)
        self.drop = Drop(rate, again)

    def construct(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """``keys``: int32 ``[batch, seq]``, the tokens of ``x`` in the same order; None: nothing is dropped."""
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
        """``keys``: int32 ``[batch, seq]``; None: there is no noise."""
        if keys is None:
            return x
        bits = self.bits(self.reshape(keys, (-1, 1)), self.channels)
        return self.add(x, self.cast(self.scale(self.cast(bits, ms.float32), self.strength), x.dtype))


class AttentionDropout(nn.Cell):
    """The same for weights of attention ``[batch, heads, q, k]``, by the keys of the queries."""

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
        """``keys``: int32 ``[batch, q]``; ``columns``: as many of the attribute ``columns`` as there are keys of attention."""
        if keys is None:
            return weights
        of_heads = self.of_heads(self.reshape(keys, (keys.shape[0], 1, -1, 1)), self.heads)
        return self.drop(weights, self.bits(of_heads, columns))
