"""Section ``model.model_config.quantization_config``: how the projections in the files of a model are quantized.

It is read from the object of that name in a ``config.json``, whose keys differ between methods. ``mindllm/quantize`` has the
number formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mindllm.architecture.quantization import CodeName, CodeSpec
from mindllm.config.section import List, Section
from mindllm.errors import UserError, nearest, shortened

KEY = "quantization_config"
Method = Literal["gptq", "gptq_v2", "awq", "bitsandbytes", "fp8", "hqq"]
Content = Mapping[str, Any]


class QuantizationConfig(Section):
    """Section ``model.model_config.quantization_config``."""

    quant_method: Method = Field(
        description="Format of the files: GPTQ (v1 stores zero points minus one), AWQ, bitsandbytes, FP8 blocks, HQQ."
    )
    code: CodeName = Field(description="Number format of a code.")
    group_size: int = Field(ge=0, description="Columns of a row that share a scale; 0: all columns.")
    act_order: bool = Field(default=False, description="Groups have non-adjacent columns (GPTQ with desc_act).")
    modules_to_not_convert: List[str] = Field(
        default=(), description="Projections that are not quantized, by parts of their names."
    )

    @property
    def has_zeros(self) -> bool:
        """Return True if a zero point is subtracted from the codes, which is the case for unsigned codes."""
        return self.code in ("uint4", "uint8")

    def group_of(self, columns: int) -> int:
        """Return the largest group size that divides both the number of columns and the groups of the files."""
        return math.gcd(columns, self.group_size) if self.group_size else columns

    def converts(self, names: tuple[str, ...]) -> bool:
        """Return True if a projection with these names, of mindllm or of the files, is quantized."""
        return not any(skipped in name for skipped in self.modules_to_not_convert for name in names)


def code_spec(section: QuantizationConfig, module: str, shape: tuple[int, ...]) -> CodeSpec:
    """Return how a projection with a weight of this shape, ``[out, in]``, is quantized."""
    out_features, in_features = shape
    group = section.group_of(in_features)
    return CodeSpec(module, out_features, in_features, section.code, group, section.has_zeros, section.act_order)


def read_quantization(path: Path, content: Any) -> QuantizationConfig:
    """Return the section for the object ``quantization_config`` of the ``config.json`` at ``path``.

    Raises:
        UserError: the method or form is not supported; names the key.
    """
    if not isinstance(content, dict):
        raise _wrong(path, "", content, "must be an object")
    method = content.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        message = "missing; it names the method" if method is None else "this method is not read"
        raise _wrong(path, "quant_method", method, f"{message}{nearest(shortened(method), READERS)}")
    return READERS[method](path, content)


def _gptq(path: Path, content: Content) -> QuantizationConfig:
    bits = _one_of(path, content, "bits", (4, 8))
    form = _one_of(path, content, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    group = _whole(path, content, "group_size", 128)
    ordered = _one_of(path, content, "desc_act", (True, False), False)
    return QuantizationConfig(
        quant_method="gptq_v2" if form == "gptq_v2" else "gptq",
        code="uint4" if bits == 4 else "uint8",
        group_size=max(0, group),
        act_order=bool(ordered) and group > 0,
        modules_to_not_convert=_skipped(path, content, "modules_to_not_convert"),
    )


def _awq(path: Path, content: Content) -> QuantizationConfig:
    _one_of(path, content, "bits", (4,))
    version = str(content.get("version") or content.get("format") or "gemm").lower()
    if version != "gemm":
        raise _wrong(path, "version", version, "this packing is not read; read is gemm")
    group = _whole(path, content, "group_size", 128)
    skipped = _skipped(path, content, "modules_to_not_convert")
    return QuantizationConfig(
        quant_method="awq", code="uint4", group_size=max(0, group), modules_to_not_convert=skipped
    )


def _bitsandbytes(path: Path, content: Content) -> QuantizationConfig:
    skipped = _skipped(path, content, "llm_int8_skip_modules")
    if content.get("load_in_8bit") or content.get("_load_in_8bit"):
        return QuantizationConfig(
            quant_method="bitsandbytes", code="int8", group_size=0, modules_to_not_convert=skipped
        )
    if not (content.get("load_in_4bit") or content.get("_load_in_4bit")):
        raise _wrong(path, "load_in_4bit", content.get("load_in_4bit"), "neither this nor load_in_8bit is true")
    kind = _one_of(path, content, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    return QuantizationConfig(quant_method="bitsandbytes", code=kind, group_size=64, modules_to_not_convert=skipped)


def _fp8(path: Path, content: Content) -> QuantizationConfig:
    _one_of(path, content, "fmt", ("e4m3",), "e4m3")
    block = content.get("weight_block_size", [128, 128])
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise _wrong(path, "weight_block_size", block, "must be rows and columns of a block")
    if block[0] != block[1]:
        raise _wrong(path, "weight_block_size", block, "blocks that are not square are not read")
    skipped = _skipped(path, content, "modules_to_not_convert")
    return QuantizationConfig(quant_method="fp8", code="e4m3", group_size=block[1], modules_to_not_convert=skipped)


def _hqq(path: Path, content: Content) -> QuantizationConfig:
    outer = content.get("quant_config")
    inner = outer.get("weight_quant_params") if isinstance(outer, dict) else None
    if not isinstance(inner, dict):
        raise _wrong(
            path, "quant_config.weight_quant_params", inner, "missing; settings that differ by module are not read"
        )
    below = f"{KEY}.quant_config.weight_quant_params"
    bits = _one_of(path, inner, "nbits", (4, 8), below=below)
    _one_of(path, inner, "axis", (1,), 1, below=below)
    for scale in ("scale_quant_params", "zero_quant_params"):
        if outer is not None and outer.get(scale):
            raise _wrong(path, f"quant_config.{scale}", outer[scale], "quantized scales are not supported")
    return QuantizationConfig(
        quant_method="hqq",
        code="uint4" if bits == 4 else "uint8",
        group_size=max(0, _whole(path, inner, "group_size", 64, below=below)),
        modules_to_not_convert=_skipped(path, content, "skip_modules"),
    )


READERS: dict[str, Callable[[Path, Content], QuantizationConfig]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "hqq": _hqq,
}


def _one_of(
    path: Path, content: Content, key: str, allowed: tuple[Any, ...], default: Any = None, below: str = KEY
) -> Any:
    value = content.get(key)
    value = default if value is None else value
    if not any(type(value) is type(item) and value == item for item in allowed):
        raise _wrong(path, key, value, f"this form is not read; read: {' or '.join(map(str, allowed))}", below)
    return value


def _whole(path: Path, content: Content, key: str, default: int, below: str = KEY) -> int:
    value = content.get(key)
    value = default if value is None else value
    if type(value) is not int or value == 0 or value < -1:
        raise _wrong(path, key, value, "must be a number of columns, or -1 for whole rows", below)
    return value


def _skipped(path: Path, content: Content, key: str) -> tuple[str, ...]:
    value = content.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong(path, key, value, "must be a list of names")
    return tuple(value)


def _wrong(path: Path, key: str, value: Any, message: str, below: str = KEY) -> UserError:
    at = f"{below}.{key}" if key else below
    return UserError(f"{path}: {at}: {message} (value {shortened(value)})")
