"""The tensors as which a model holds a projection in codes, and the codes that such tensors are.

Ascend's ``WeightQuantBatchMatmul`` takes codes as signed integers ``[in, out]``, ``Wᵀ = (codes + offsets) · scales``.

Its documentation (CANN, ``aclnnWeightQuantBatchMatmulV2``) has the formula, and weights ``[in, out]`` with scales
``[groups, out]``. It has matrices ``[out, in]``, too; but then it takes the memory of scales for ``[out, groups]``
(``CheckContiguous`` in ``op_api/aclnn_weight_quant_batch_matmul_v2.cpp`` of ``hicann/ops-nn``), while MindSpore's kernel tells it
only of ``x`` and the matrix that they are transposed. Two codes of 4 bits in a byte are neighbours along ``out``, the first in
the low bits: so packs CANN's ``aclnnConvertWeightToINT4Pack``, and so do MindSpore's tests of the operator on Ascend 910B, whose
groups stand as here (``test_ms_int4_weight_quant_pergroup_1p_GE``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindllm.architecture.quantization import CODES, COLUMNS, SCALES, ZEROS, CodeName, CodeSpec, bits_of
from mindllm.quantize.codes import Codes, pack
from mindllm.quantize.rounding import quantize

NUMBERS = ("uint4", "uint8", "int8")  # codes that are integers; others are looked up in a table
GROUP_UNIT = 32  # columns: a group has a multiple of them
WIDEST = 65535  # rows or columns of a matrix, on Ascend 910B and 910C


def held_tensors(codes: Codes) -> dict[str, np.ndarray]:
    """What the tensors of ``DequantizedWeight`` hold of a matrix, by their names below the projection."""
    found = {CODES: codes.packed, SCALES: codes.scales[:, :, None, None]}
    if codes.zeros is not None:
        found[ZEROS] = codes.zeros[:, :, None, None]
    if codes.columns is not None:
        found[COLUMNS] = np.argsort(codes.columns).astype(np.int32)  # where each column of the matrix stands
    return found


def codes_of(code: CodeName, tensors: Mapping[str, np.ndarray]) -> Codes:
    """The matrix of which :func:`held_tensors` are ``tensors``; ``code``: its kind."""
    zeros, columns = (tensors.get(name) for name in (ZEROS, COLUMNS))
    return Codes(
        code,
        tensors[CODES],
        tensors[SCALES][:, :, 0, 0],
        None if zeros is None else zeros[:, :, 0, 0],
        None if columns is None else np.argsort(columns).astype(np.int32),
    )


def rounded(weight: np.ndarray, spec: CodeSpec) -> dict[str, np.ndarray]:
    """The same of a weight ``[out, in]`` that is rounded to codes now."""
    found = held_tensors(quantize(weight, spec.code, spec.group))
    return {**found, **({COLUMNS: np.arange(spec.in_features, dtype=np.int32)} if spec.ordered else {})}


@dataclass(frozen=True)
class Integers:
    """A matrix ``[out, in]`` as the operator takes it.

    Attributes:
        codes: int8 ``[in, out]``; of 4 bits two in each, ``[in, out / 2]``.
        scales: float32 ``[groups, out]``.
        offsets: float32 ``[groups, out]``, which are added to codes; None: none.
        columns: int32 ``[in]``, the column of the matrix that each row of ``codes`` is of; None: its own.
    """

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    columns: np.ndarray | None


def are_integers(spec: CodeSpec) -> bool:
    """Whether the operator can multiply by these codes: by their kind, their groups and the sizes of their matrix."""
    grouped = spec.group < spec.in_features
    narrow = max(spec.in_features, spec.out_features) <= WIDEST
    paired = bits_of(spec.code) == 8 or spec.out_features % 2 == 0
    return spec.code in NUMBERS and narrow and paired and not (grouped and spec.group % GROUP_UNIT)


def integers(codes: Codes) -> Integers:
    """The same matrix. Of codes from 0 on, ``u`` becomes ``u - m``, and a zero point ``z`` the offset ``m - z``, with
    ``m = 2^(bits - 1)``; signed ones stay, without offsets.
    """
    bits, (out, width) = bits_of(codes.code), codes.shape
    values = codes.unpacked().reshape(out, width).T
    offsets = None
    if codes.zeros is not None:
        middle = 1 << (bits - 1)
        values = values ^ np.uint8(middle)  # so the bits of u - middle, in two's complement
        offsets = np.ascontiguousarray(np.float32(middle) - codes.zeros.T)
    packed = np.ascontiguousarray(pack(values, bits)).view(np.int8)
    return Integers(packed, np.ascontiguousarray(codes.scales.T), offsets, codes.columns)
