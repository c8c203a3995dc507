"""A matrix in codes: ``W[:, columns] = (table[code] - zero) · scale``; groups of columns have scales, and perhaps zeros.

The columns of a row are cut into equal groups. ``columns`` is an order of the columns in which groups lie beside each other,
where they do not in the matrix (GPTQ's act-order).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mindllm.architecture.quantization import CodeName, bits_of
from mindllm.quantize.tables import table_of


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 ``[..., n]`` of ``bits`` each as bytes ``[..., n · bits / 8]``; of two in a byte the first in the low bits."""
    if bits == 8:
        return np.ascontiguousarray(codes, np.uint8)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The codes, uint8 ``[..., n]``, that :func:`pack` was given."""
    if bits == 8:
        return packed
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


@dataclass(frozen=True)
class Codes:
    """A matrix ``[out, in]`` in codes.

    Attributes:
        code: what codes mean.
        packed: bytes, uint8 ``[out, groups, bytes of a group]``.
        scales: float32 ``[out, groups]``.
        zeros: float32 ``[out, groups]``; None: nothing is subtracted.
        columns: int32 ``[in]``, see above; None: as they are.
    """

    code: CodeName
    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    columns: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        code: CodeName,
        codes: np.ndarray,
        scales: np.ndarray,
        zeros: np.ndarray | None = None,
        columns: np.ndarray | None = None,
    ) -> Codes:
        """From codes ``[out, in]``, a byte each, and scales (and zeros) ``[out, groups]``."""
        out, width = codes.shape
        grouped = codes.reshape(out, scales.shape[1], width // scales.shape[1])
        return cls(code, pack(grouped, bits_of(code)), scales.astype(np.float32), _floats(zeros), columns)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        out, groups, _ = self.packed.shape
        return out, groups * self.group

    @property
    def group(self) -> int:
        """Columns in a group."""
        return int(self.packed.shape[2]) * 8 // bits_of(self.code)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.packed, self.scales, self.zeros, self.columns)
        return sum(array.nbytes for array in arrays if array is not None)

    def unpacked(self) -> np.ndarray:
        """The codes, uint8 ``[out, groups, columns of a group]``."""
        return unpack(self.packed, bits_of(self.code))

    def values(self) -> np.ndarray:
        """The matrix, float32 ``[out, in]``."""
        values = table_of(self.code)[self.unpacked()]
        if self.zeros is not None:
            values -= self.zeros[:, :, None]
        values *= self.scales[:, :, None]
        values = values.reshape(self.shape)
        if self.columns is None:
            return values
        ordered = np.empty_like(values)
        ordered[:, self.columns] = values
        return ordered

    def rows(self, chosen: np.ndarray) -> Codes:
        """The matrix of the rows ``chosen``, int ``[rows]``."""
        zeros = None if self.zeros is None else self.zeros[chosen]
        return replace(self, packed=self.packed[chosen], scales=self.scales[chosen], zeros=zeros)


def _floats(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array.astype(np.float32)
