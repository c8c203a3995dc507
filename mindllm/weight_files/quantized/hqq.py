"""Files of HQQ (Badri & Shaji, 2023), groups along rows: ``(W_q - zero) · scale``.

Groups follow each other row by row, ``[groups of the matrix, group]``. In 4 bits, ``W_q`` holds the first half of them in the
high and the second half in the low bits of its bytes. ``scale`` and ``zero`` are ``[groups, 1]``, ``shape`` that of the matrix.
"""

from __future__ import annotations

import numpy as np

from mindllm.architecture.quantization import bits_of
from mindllm.config.quantization import QuantizationConfig
from mindllm.quantize.codes import Codes
from mindllm.weight_files.quantized.module import Module

MARK = "W_q"
PARTS = (
    *("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero"),
)


def shape(module: Module, section: QuantizationConfig) -> tuple[int, int]:
    """``[out, in]`` of the matrix."""
    out, width = map(int, module.array("shape", (2,), "int64", "int32"))
    if out <= 0 or width <= 0:
        raise module.error("shape", f"is no shape of a matrix: {[out, width]}")
    return out, width


def read(module: Module, section: QuantizationConfig) -> Codes:
    """The matrix in codes."""
    out, width = shape(module, section)
    size = section.group_size or width
    if width % size:
        raise module.error("shape", f"has {width} columns, which groups of {size} do not divide")
    groups = out * width // size
    halves = 2 if bits_of(section.code) == 4 else 1
    if groups % halves:
        raise module.error("W_q", f"has an odd number of groups, {groups}")
    packed = module.array("W_q", (groups // halves, size), "uint8")
    codes = np.concatenate([packed >> 4, packed & 15]) if halves == 2 else packed
    scales, zeros = (module.floats(part, (groups, 1)).reshape(out, -1) for part in ("scale", "zero"))
    return Codes.of(section.code, codes.reshape(out, width), scales, zeros)
