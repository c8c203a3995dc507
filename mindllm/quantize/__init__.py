"""Weights as codes of 4 or 8 bits with a scale per group (``codes``), and rounding to them (``rounding``). Only numpy is used."""

from mindllm.quantize.codes import (
    Codes,
    Integers,
    byte_table,
    code_values,
    fits_integers,
    pack,
    to_integers,
    unpack,
)
from mindllm.quantize.rounding import (
    channel_factors,
    output_error,
    quantize,
    quantize_clipped,
    quantize_gptq,
    round_tensors,
)

__all__ = [
    "Codes",
    "Integers",
    "byte_table",
    "channel_factors",
    "code_values",
    "fits_integers",
    "output_error",
    "pack",
    "quantize",
    "quantize_clipped",
    "quantize_gptq",
    "round_tensors",
    "to_integers",
    "unpack",
]
