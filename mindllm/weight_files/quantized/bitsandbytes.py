"""Files of bitsandbytes: 4-bit codes of blocks (QLoRA: Dettmers et al., 2023), 8-bit integers of rows (Dettmers et al., 2022).

4 bits: ``weight`` has the codes of the matrix row by row, two in a byte, the first in the high bits; ``weight.absmax`` the
scale of every 64 of them, or its code with double quantization: ``weight.nested_quant_map``, scaled by
``weight.nested_absmax`` for every 256 and moved by an offset. Shape and sizes are JSON, as bytes, in
``weight.quant_state.bitsandbytes__nf4``.

8 bits: ``weight`` int8, ``SCB`` the largest magnitude of every row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mindllm.config.quantization import QuantizationConfig
from mindllm.outside import parse_json
from mindllm.quantize.codes import Codes
from mindllm.quantize.tables import table_of
from mindllm.weight_files.quantized.module import FLOATS, Module

STATE = "weight.quant_state.bitsandbytes__"
LARGEST_INT8 = 127.0
LONGEST_STATE = 1 << 16  # bytes of JSON


class FourBit:
    """NF4 and FP4."""

    MARK = "weight.absmax"
    PARTS = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(f"{STATE}nf4", f"{STATE}fp4"),
    )

    @classmethod
    def shape(cls, module: Module, section: QuantizationConfig) -> tuple[int, int]:
        """``[out, in]`` of the matrix."""
        found = cls.state(module, section).get("shape")
        if not (isinstance(found, list) and len(found) == 2 and all(type(size) is int and size > 0 for size in found)):
            raise module.error(f"{STATE}{section.code}", f"has no shape of a matrix (value {found})")
        return found[0], found[1]

    @classmethod
    def state(cls, module: Module, section: QuantizationConfig) -> dict[str, Any]:
        """What is stored as JSON."""
        part = f"{STATE}{section.code}"
        (size,) = module.shape(part, 1)
        if size > LONGEST_STATE:
            raise module.error(part, f"is no description of a matrix: it has {size} bytes")
        try:
            content = parse_json(module.array(part, (size,), "uint8").tobytes())
        except ValueError as error:
            raise module.error(part, f"is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("quant_type") != section.code:
            raise module.error(part, f"does not describe codes of {section.code}")
        return content

    @classmethod
    def read(cls, module: Module, section: QuantizationConfig) -> Codes:
        """The matrix in codes. Blocks that end within a row become smaller groups."""
        out, width = cls.shape(module, section)
        state, size = cls.state(module, section), out * width
        block = _size(module, section, state, "blocksize")
        group = section.group_of(width)
        if block % group:
            raise module.error(f"{STATE}{section.code}", f"has blocks of {block}, config.json of {section.group_size}")
        packed = np.ascontiguousarray(_any_shape(module, "weight", (size + 1) // 2))
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[:size].reshape(out, width)
        scales = cls._scales(module, section, state, -(-size // block))
        _require_table(module, table_of(section.code))
        of_group = scales[np.arange(0, size, group) // block].reshape(out, width // group)
        return Codes.of(section.code, codes, of_group)

    @classmethod
    def _scales(cls, module: Module, section: QuantizationConfig, state: dict[str, Any], blocks: int) -> np.ndarray:
        if "weight.nested_absmax" not in module.parts:
            return module.floats("weight.absmax", (blocks,))
        codes = module.array("weight.absmax", (blocks,), "uint8")
        size = _size(module, section, state, "nested_blocksize")
        outer = module.floats("weight.nested_absmax", (-(-blocks // size),))
        offset = state.get("nested_offset")
        if not isinstance(offset, int | float) or not math.isfinite(offset):
            raise module.error(f"{STATE}{section.code}", f"has no nested_offset (value {offset})")
        table = module.floats("weight.nested_quant_map", (256,))
        return table[codes] * outer[np.arange(blocks) // size] + np.float32(offset)


class EightBit:
    """Rows of int8."""

    MARK = "SCB"
    PARTS = ("weight", "SCB", "weight_format")

    @classmethod
    def shape(cls, module: Module, section: QuantizationConfig) -> tuple[int, int]:
        """``[out, in]`` of the matrix."""
        out, width = module.shape("weight", 2)
        return out, width

    @classmethod
    def read(cls, module: Module, section: QuantizationConfig) -> Codes:
        """The matrix in codes."""
        out, width = cls.shape(module, section)
        if "weight_format" in module.parts and np.asarray(module.parts["weight_format"]).any():
            raise module.error("weight_format", "is not that of rows; save the model anew")
        codes = module.array("weight", (out, width), "int8").view(np.uint8)
        scales = module.floats("SCB", (out,)) / np.float32(LARGEST_INT8)
        return Codes.of(section.code, codes, scales[:, None])


def _size(module: Module, section: QuantizationConfig, state: dict[str, Any], key: str) -> int:
    size = state.get(key)
    if type(size) is not int or size <= 0:
        raise module.error(f"{STATE}{section.code}", f"has no {key} (value {size})")
    return size


def _any_shape(module: Module, part: str, size: int) -> np.ndarray:
    """The bytes of a tensor of any shape and type."""
    if part not in module.parts:
        raise module.error(part, "missing")
    content = np.ascontiguousarray(np.asarray(module.parts[part])).reshape(-1).view(np.uint8)
    if content.size != size:
        raise module.error(part, f"has {content.size} bytes instead of {size}")
    return content


def _require_table(module: Module, table: np.ndarray) -> None:
    """Refuses codes that mean something else than their name says."""
    part = "weight.quant_map"
    if part in module.parts:
        found = module.array(part, table.shape, *FLOATS).astype(np.float32)
        if not np.allclose(found, table, atol=2e-3):
            raise module.error(part, "is another table than that of its name")
