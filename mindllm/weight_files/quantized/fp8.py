"""Blocks of FP8 (DeepSeek-V3, section 3.3): ``weight`` E4M3 ``[out, in]``, ``weight_scale_inv`` a factor for every block."""

from __future__ import annotations

import numpy as np

from mindllm.config.quantization import QuantizationConfig
from mindllm.quantize.codes import Codes
from mindllm.weight_files.quantized.module import Module

MARK = "weight_scale_inv"
PARTS = ("weight", "weight_scale_inv")


def shape(module: Module, section: QuantizationConfig) -> tuple[int, int]:
    """``[out, in]`` of the matrix."""
    out, width = module.shape("weight", 2)
    return out, width


def read(module: Module, section: QuantizationConfig) -> Codes:
    """The matrix in codes: each row has the factors of the blocks it runs through."""
    out, width = shape(module, section)
    block, group = section.group_size, section.group_of(width)
    codes = module.array("weight", (out, width), "float8_e4m3fn").view(np.uint8)
    if ((codes & 0x7F) == 0x7F).any():
        raise module.error("weight", "has values that are not finite")
    factors = module.floats("weight_scale_inv", (-(-out // block), -(-width // block)))
    scales = factors[np.arange(out) // block][:, np.arange(0, width, group) // block]
    return Codes.of(section.code, codes, scales)
