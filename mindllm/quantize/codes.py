"""Matrices in codes of 4 or 8 bits: ``W[:, columns] = (values[code] - zero) · scale``.

The columns of a row are cut into equal groups with a scale and perhaps a zero point each. ``columns`` is an order in which the
columns of a group are adjacent, if they are not in the matrix (GPTQ's act-order).

NF4 and FP4 are those of bitsandbytes (Dettmers et al., 2023, appendix E, and its library). E4M3 is the 8-bit float of the Open
Compute Project (Micikevicius et al., 2022).

Ascend's ``WeightQuantBatchMatmul`` takes signed integers ``[in, out]``, ``Wᵀ = (codes + offsets) · scales``. Its documentation
(CANN, ``aclnnWeightQuantBatchMatmulV2``) has the formula, and weights ``[in, out]`` with scales ``[groups, out]``. It also has
matrices ``[out, in]``, but then it reads scales as ``[out, groups]`` (``CheckContiguous`` in
``op_api/aclnn_weight_quant_batch_matmul_v2.cpp`` of ``hicann/ops-nn``), while MindSpore's kernel marks only ``x`` and the matrix
as transposed. Two codes of 4 bits in a byte are neighbors along ``out``, the first in the low bits: CANN's
``aclnnConvertWeightToINT4Pack`` packs this way, and so do MindSpore's tests of the operator on Ascend 910B, with groups as here
(``test_ms_int4_weight_quant_pergroup_1p_GE``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import ml_dtypes
import numpy as np

from mindllm.architecture.quantization import CODES, COLUMNS, SCALES, ZEROS, CodeName, CodeSpec, bits_of

# Quantiles of the normal distribution between -1 and 1, with an exact zero.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # in twelfths, by the three bits below the sign


INTEGER_CODES = ("uint4", "uint8", "int8")  # the others are looked up in a table
GROUP_UNIT = 32  # the operator requires groups of a multiple of these columns
LARGEST_AXIS = 65535  # of a matrix of the operator, on Ascend 910B and 910C


@cache
def code_values(code: CodeName) -> np.ndarray:
    """Return the value of every code, float32 ``[16]`` or ``[256]``. Codes of E4M3 that are not numbers are not finite."""
    every = np.arange(2 ** bits_of(code), dtype=np.uint8)
    if code == "nf4":
        values = np.array(NF4, np.float32)
    elif code == "fp4":
        positive = np.array(FP4_MAGNITUDES, np.float32) / np.float32(12)
        values = np.concatenate([positive, -positive])
    elif code == "e4m3":
        values = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        values = (every.view(np.int8) if code == "int8" else every).astype(np.float32)
    values.setflags(write=False)
    return values


@cache
def byte_table(code: CodeName) -> np.ndarray:
    """Return the values in every byte of packed codes, float32 ``[256, codes per byte]``, low bits first."""
    values = code_values(code)
    every = np.arange(256)
    table = values[every][:, None] if bits_of(code) == 8 else np.stack([values[every & 15], values[every >> 4]], axis=1)
    table.setflags(write=False)
    return table


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes uint8 ``[..., n]`` of ``bits`` each to bytes ``[..., n · bits / 8]``, the first of two in the low bits."""
    if bits == 8:
        return np.ascontiguousarray(codes, np.uint8)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes, uint8 ``[..., n]``, of bytes from :func:`pack`."""
    if bits == 8:
        return packed
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


@dataclass(frozen=True)
class Codes:
    """A matrix ``[out, in]`` in codes.

    Attributes:
        code: the kind of codes.
        packed: bytes, uint8 ``[out, groups, bytes of a group]``.
        scales: float32 ``[out, groups]``.
        zeros: float32 ``[out, groups]``, or None without zero points.
        columns: the order of columns, int32 ``[in]``, or None for that of the matrix.
    """

    code: CodeName
    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    columns: np.ndarray | None = None

    @classmethod
    def from_unpacked(
        cls,
        code: CodeName,
        codes: np.ndarray,
        scales: np.ndarray,
        zeros: np.ndarray | None = None,
        columns: np.ndarray | None = None,
    ) -> Codes:
        """Return the matrix of codes ``[out, in]``, a byte each, and scales (and zeros) ``[out, groups]``."""
        out, width = codes.shape
        grouped = codes.reshape(out, scales.shape[1], width // scales.shape[1])
        zeros = None if zeros is None else zeros.astype(np.float32)
        return cls(code, pack(grouped, bits_of(code)), scales.astype(np.float32), zeros, columns)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        out, groups, _ = self.packed.shape
        return out, groups * self.group

    @property
    def group(self) -> int:
        """Columns per group."""
        return int(self.packed.shape[2]) * 8 // bits_of(self.code)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.packed, self.scales, self.zeros, self.columns)
        return sum(array.nbytes for array in arrays if array is not None)

    def unpacked(self) -> np.ndarray:
        """Return the codes, uint8 ``[out, groups, columns of a group]``."""
        return unpack(self.packed, bits_of(self.code))

    def values(self) -> np.ndarray:
        """Return the matrix, float32 ``[out, in]``."""
        values = code_values(self.code)[self.unpacked()]
        if self.zeros is not None:
            values -= self.zeros[:, :, None]
        values *= self.scales[:, :, None]
        values = values.reshape(self.shape)
        if self.columns is None:
            return values
        ordered = np.empty_like(values)
        ordered[:, self.columns] = values
        return ordered

    def rows(self, indices: np.ndarray) -> Codes:
        """Return the matrix of some rows, int ``[rows]``."""
        zeros = None if self.zeros is None else self.zeros[indices]
        return replace(self, packed=self.packed[indices], scales=self.scales[indices], zeros=zeros)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the tensors of ``DequantizedWeight`` for this matrix, by name."""
        tensors = {CODES: self.packed, SCALES: self.scales[:, :, None, None]}
        if self.zeros is not None:
            tensors[ZEROS] = self.zeros[:, :, None, None]
        if self.columns is not None:
            tensors[COLUMNS] = np.argsort(self.columns).astype(np.int32)  # the place of each column of the matrix
        return tensors

    @classmethod
    def from_tensors(cls, code: CodeName, tensors: Mapping[str, np.ndarray]) -> Codes:
        """Return the matrix of the tensors of ``DequantizedWeight``."""
        zeros, columns = (tensors.get(name) for name in (ZEROS, COLUMNS))
        return cls(
            code,
            tensors[CODES],
            tensors[SCALES][:, :, 0, 0],
            None if zeros is None else zeros[:, :, 0, 0],
            None if columns is None else np.argsort(columns).astype(np.int32),
        )


@dataclass(frozen=True)
class Integers:
    """A matrix ``[out, in]`` for ``WeightQuantBatchMatmul``.

    Attributes:
        codes: int8 ``[in, out]``, or two codes of 4 bits per byte, ``[in, out / 2]``.
        scales: float32 ``[groups, out]``.
        offsets: float32 ``[groups, out]``, which are added to codes, or None.
        columns: the column of the matrix for each row of ``codes``, int32 ``[in]``, or None if they are equal.
    """

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    columns: np.ndarray | None


def fits_integers(spec: CodeSpec) -> bool:
    """Return True if the operator supports the kind of codes, the groups and the size of the matrix."""
    grouped = spec.group < spec.in_features
    fits = max(spec.in_features, spec.out_features) <= LARGEST_AXIS
    paired = bits_of(spec.code) == 8 or spec.out_features % 2 == 0
    return spec.code in INTEGER_CODES and fits and paired and not (grouped and spec.group % GROUP_UNIT)


def to_integers(codes: Codes) -> Integers:
    """Convert a matrix to signed integers.

    With ``m = 2^(bits - 1)``, an unsigned code ``u`` becomes ``u - m`` and its zero point ``z`` the offset ``m - z``. Signed
    codes stay unchanged, without offsets.
    """
    bits, (out, width) = bits_of(codes.code), codes.shape
    values = codes.unpacked().reshape(out, width).T
    offsets = None
    if codes.zeros is not None:
        middle = 1 << (bits - 1)
        values = values ^ np.uint8(middle)  # the bits of u - middle in two's complement
        offsets = np.ascontiguousarray(np.float32(middle) - codes.zeros.T)
    packed = np.ascontiguousarray(pack(values, bits)).view(np.int8)
    return Integers(packed, np.ascontiguousarray(codes.scales.T), offsets, codes.columns)
