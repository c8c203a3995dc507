"""AWQ's files (Lin et al., 2024; AutoAWQ's "gemm" packing): 4 bits, the codes of eight neighbouring rows in an int32.

``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]``, ``scales`` ``[groups, out]``. Within a word rows have
the order that its kernels unpack fastest.
"""

from __future__ import annotations

import numpy as np

from mindllm.config.quantization import QuantizationConfig
from mindllm.quantize.codes import Codes
from mindllm.weight_files.quantized.gptq import pack_words, unpack_words
from mindllm.weight_files.quantized.module import Module, words

MARK = "qweight"
PARTS = ("qweight", "qzeros", "scales")
BITS, ROWS = 4, 8
PLACES = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # which of eight rows each four bits of a word hold, from the lowest


def shape(module: Module, section: QuantizationConfig) -> tuple[int, int]:
    """``[out, in]`` of the matrix."""
    width, words_of_row = module.shape("qweight", 2)
    return words_of_row * ROWS, width


def read(module: Module, section: QuantizationConfig) -> Codes:
    """The matrix in codes."""
    out, width = shape(module, section)
    size = section.group_size or width
    if width % size:
        raise module.error("qweight", f"has {width} columns, which groups of {size} do not divide")
    groups = width // size
    codes = _rows(module.array("qweight", (width, out // ROWS), "int32")).T
    zeros = _rows(module.array("qzeros", (groups, out // ROWS), "int32")).T
    return Codes.of(section.code, codes, module.floats("scales", (groups, out)).T, zeros)


def _rows(packed: np.ndarray) -> np.ndarray:
    """int32 ``[n, out / 8]`` -> uint8 ``[n, out]``."""
    found = unpack_words(words(packed), BITS).reshape(len(packed), -1, ROWS)
    return found[:, :, np.argsort(PLACES)].reshape(len(packed), -1)


def tensors(codes: Codes) -> dict[str, np.ndarray]:
    """What :func:`read` reads of a matrix."""
    assert codes.zeros is not None
    flat = codes.unpacked().reshape(codes.shape)
    return {
        "qweight": _packed(flat.T),
        "qzeros": _packed(codes.zeros.T.astype(np.uint8)),
        "scales": np.ascontiguousarray(codes.scales.T, np.float16),
    }


def _packed(rows: np.ndarray) -> np.ndarray:
    """uint8 ``[n, out]`` -> int32 ``[n, out / 8]``."""
    placed = rows.reshape(len(rows), -1, ROWS)[:, :, PLACES]
    return pack_words(placed.reshape(len(rows), -1), BITS)
