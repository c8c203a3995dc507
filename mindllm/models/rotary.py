"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face's Llama, with its rotary scalings."""

from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.models.kernels import DTYPES, Kernels


def inverse_frequencies(model: ModelConfig) -> np.ndarray:
    """Rotation per position of each pair of channels, radians: ``theta^(-2i/head_dim)``, scaled. float64 ``[head_dim / 2]``."""
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim
    frequencies = model.theta**-exponents
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    return _llama3_scaled(frequencies, scaling)


def _llama3_scaled(frequencies: np.ndarray, scaling) -> np.ndarray:
    """Llama 3.1's scaling: long wavelengths are divided by ``factor``, short ones kept, those between interpolated."""
    original = scaling.original_max_position_embeddings
    turns = original * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rotary_tables(model: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions ``0 … length - 1``: two float32 arrays ``[length, head_dim]``."""
    angles = np.outer(np.arange(length, dtype=np.float64), inverse_frequencies(model))
    angles = np.concatenate([angles, angles], axis=-1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def half_turn_matrix(width: int) -> np.ndarray:
    """``x @ matrix`` is ``(-second half, first half)`` of ``x``: float32 ``[width, width]``."""
    half = np.eye(width // 2, dtype=np.float32)
    zero = np.zeros_like(half)
    return np.block([[zero, half], [-half, zero]])


class RotaryEmbedding(nn.Cell):
    """Rotates queries or keys ``[batch, heads, seq, head_dim]`` by tables ``[seq, head_dim]`` (or any shape that broadcasts).

    On CPU the half turn is a matrix product, which is exact and takes half as long as splitting and joining channels.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.compute_dtype = DTYPES[model.rotary_dtype]
        self.output_dtype = kernels.activation
        self.cast = P.Cast()
        self.mul_cos = P.Mul()
        self.mul_sin = P.Mul()
        self.add = P.Add()
        self.by_matrix = kernels.cpu
        if self.by_matrix:
            self.matrix = Tensor(half_turn_matrix(model.head_dim), self.compute_dtype)
            self.matmul = P.MatMul()
            self.reshape = P.Reshape()
        else:
            self.neg = P.Neg()
            self.split = P.Split(axis=-1, output_num=2)
            self.concat = P.Concat(axis=-1)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.cast(x, self.compute_dtype)
        cos = self.cast(cos, self.compute_dtype)
        sin = self.cast(sin, self.compute_dtype)
        y = self.add(self.mul_cos(x, cos), self.mul_sin(self.half_turned(x), sin))
        return self.cast(y, self.output_dtype)

    def half_turned(self, x: Tensor) -> Tensor:
        """``(-second half, first half)`` of the channels."""
        if self.by_matrix:
            return self.reshape(self.matmul(self.reshape(x, (-1, x.shape[-1])), self.matrix), x.shape)
        first, second = self.split(x)
        return self.concat((self.neg(second), first))
