"""Tensors of a directory in which projections are in codes, as if they were not: each is a matrix that knows its codes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mindllm.config.quantization import QuantizationConfig
from mindllm.errors import UserError
from mindllm.quantize.codes import Codes
from mindllm.train.checkpoint.tensors import TensorSource
from mindllm.weight_files.quantized import awq, fp8, gptq, hqq
from mindllm.weight_files.quantized.bitsandbytes import EightBit, FourBit
from mindllm.weight_files.quantized.module import Module

FLOAT32 = np.dtype(np.float32)


class Format(Protocol):
    """How one method stores a projection."""

    MARK: str
    """The tensor by which a projection in codes is known."""
    PARTS: tuple[str, ...]
    """All tensors it may have, but the bias."""

    def shape(self, module: Module, section: QuantizationConfig) -> tuple[int, int]: ...

    def read(self, module: Module, section: QuantizationConfig) -> Codes: ...


@dataclass(frozen=True)
class QuantizedMatrix:
    """A projection that is stored in codes, or ``chosen`` rows of it: a float32 matrix when it is asked for its array.

    ``transposed``: the files of the family have the matrix as ``[in, out]`` where it is no codes.
    """

    module: Module
    section: QuantizationConfig
    whole: tuple[int, int]
    chosen: np.ndarray | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.whole[0] if self.chosen is None else len(self.chosen)
        return (self.whole[1], rows) if self.transposed else (rows, self.whole[1])

    @property
    def dtype(self) -> np.dtype:
        return FLOAT32

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        values = self.codes().values()
        return (values.T if self.transposed else values).astype(dtype or FLOAT32, copy=False)

    def codes(self) -> Codes:
        """The matrix ``[out, in]`` in codes."""
        found = format_of(self.section).read(self.module, self.section)
        return found if self.chosen is None else found.rows(self.chosen)

    def rows(self, chosen: np.ndarray) -> QuantizedMatrix:
        """Rows of the matrix ``[out, in]``."""
        return QuantizedMatrix(self.module, self.section, self.whole, chosen)


def format_of(section: QuantizationConfig) -> Format:
    """The reader for the files that ``section`` describes."""
    if section.quant_method == "bitsandbytes":
        return EightBit if section.code == "int8" else FourBit  # type: ignore[return-value]
    formats: dict[str, Format] = {"awq": awq, "fp8": fp8, "hqq": hqq}  # type: ignore[dict-item]
    return formats.get(section.quant_method, gptq)  # type: ignore[arg-type]


def with_matrices(
    directory: Path,
    tensors: Mapping[str, TensorSource],
    section: QuantizationConfig,
    transposed: Collection[str] = (),
) -> dict[str, TensorSource]:
    """``tensors`` of ``directory`` with one matrix, ``NAME.weight``, in the place of those that hold ``NAME`` in codes.

    ``transposed``: names of matrices that the family has as ``[in, out]``.

    Raises:
        UserError: none is in codes, or a tensor has a wrong shape.
    """
    form = format_of(section)
    ending = f".{form.MARK}"
    modules = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    if not modules:
        raise UserError(
            f"{directory}: config.json says quant_method {section.quant_method}, and no tensor ends in {ending}"
        )
    found = dict(tensors)
    for name in modules:
        parts = {part: found.pop(f"{name}.{part}") for part in form.PARTS if f"{name}.{part}" in found}
        module = Module(directory, name, parts)
        weight = f"{name}.weight"
        if weight in found:
            raise UserError(f"{directory}: {weight} is there beside {name}{ending}, the same matrix in codes")
        found[weight] = QuantizedMatrix(module, section, form.shape(module, section), None, weight in transposed)
    return found
