"""GPTQ's files (Frantar et al., 2023; AutoGPTQ, GPTQModel): integers packed in int32, of the transposed matrix.

``qweight`` int32 ``[in · bits / 32, out]`` holds the codes of ``32 / bits`` neighbouring columns in a word, lowest bits first;
``qzeros`` int32 ``[groups, out · bits / 32]`` zero points of neighbouring rows in the same way, less one in the first version of
the format; ``scales`` ``[groups, out]``; ``g_idx`` int32 ``[in]`` the group of each column (absent: one after the other).
"""

from __future__ import annotations

import numpy as np

from mindllm.architecture.quantization import bits_of
from mindllm.config.quantization import QuantizationConfig
from mindllm.quantize.codes import Codes
from mindllm.weight_files.quantized.module import Module, words

MARK = "qweight"
PARTS = ("qweight", "qzeros", "scales", "g_idx")
WORD = 32


def shape(module: Module, section: QuantizationConfig) -> tuple[int, int]:
    """``[out, in]`` of the matrix."""
    rows, out = module.shape("qweight", 2)
    return out, rows * WORD // bits_of(section.code)


def read(module: Module, section: QuantizationConfig) -> Codes:
    """The matrix in codes."""
    out, width = shape(module, section)
    bits = bits_of(section.code)
    size = section.group_size or width
    groups = -(-width // size)
    packed = words(module.array("qweight", (width * bits // WORD, out), "int32"))
    if out * bits % WORD:
        raise module.error("qweight", f"has {out} rows, of which zero points do not fill words of {WORD} bits")
    zeros = unpack_words(words(module.array("qzeros", (groups, out * bits // WORD), "int32")), bits).astype(np.float32)
    if section.quant_method == "gptq":
        zeros += 1.0
    scales = module.floats("scales", (groups, out))
    codes = unpack_words(packed.T, bits)  # [out, in]
    group_of_column, columns = _groups(module, width, size, groups, section.act_order)
    first = group_of_column[:: section.group_of(width)]
    if columns is not None:
        codes = codes[:, columns]
    return Codes.of(section.code, codes, scales[first].T, zeros[first].T, columns)


def _groups(module: Module, width: int, size: int, groups: int, ordered: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """The group of every column, in an order of columns in which it rises; and this order, if it is not that of the matrix."""
    straight = np.arange(width) // size
    if "g_idx" not in module.parts:
        return straight, np.arange(width, dtype=np.int32) if ordered else None
    found = module.array("g_idx", (width,), "int32", "int64")
    if found.min() < 0 or found.max() >= groups:
        raise module.error("g_idx", f"names groups {found.min()} to {found.max()} of {groups}")
    if not ordered:
        if not np.array_equal(found, straight):
            raise module.error("g_idx", "groups do not follow each other, which desc_act of config.json denies")
        return straight, None
    columns = np.argsort(found, kind="stable").astype(np.int32)
    if not np.array_equal(found[columns], straight):
        raise module.error("g_idx", f"has groups of other sizes than {size}")
    return straight, columns


def unpack_words(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint32 ``[rows, words]`` -> uint8 ``[rows, words · 32 / bits]``, lowest bits first."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    codes = (packed[:, :, None] >> shifts) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(len(packed), -1)


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 ``[rows, columns]`` -> int32 ``[rows, columns · bits / 32]``: what :func:`unpack_words` takes apart."""
    count = WORD // bits
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    grouped = codes.reshape(len(codes), -1, count).astype(np.uint32) << shifts
    return np.bitwise_or.reduce(grouped, axis=2).view(np.int32)


def tensors(codes: Codes) -> dict[str, np.ndarray]:
    """What :func:`read` reads of a matrix, in the first version of the format; zero points are 1 or more there."""
    assert codes.zeros is not None
    bits, width = bits_of(codes.code), codes.shape[1]
    flat = codes.unpacked().reshape(codes.shape)
    group_of_column = (np.arange(width) // codes.group).astype(np.int32)
    if codes.columns is not None:
        back = np.argsort(codes.columns)
        flat, group_of_column = flat[:, back], group_of_column[back]
    stored = (codes.zeros.T.astype(np.int64) - 1).astype(np.uint8)
    return {
        "qweight": np.ascontiguousarray(pack_words(flat, bits).T),
        "qzeros": pack_words(stored, bits),
        "scales": np.ascontiguousarray(codes.scales.T, np.float16),
        "g_idx": group_of_column,
    }
