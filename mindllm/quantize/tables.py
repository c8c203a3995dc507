"""What a code of 4 or 8 bits means before it is scaled.

NF4 and FP4 are those of bitsandbytes (Dettmers et al., 2023, appendix E, and its library); E4M3 is the 8-bit float of the Open
Compute Project (Micikevicius et al., 2022).
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from mindllm.architecture.quantization import CodeName, bits_of

# Quantiles of the normal distribution between -1 and 1, with an exact zero.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # in twelfths, by the three bits below the sign


@cache
def table_of(code: CodeName) -> np.ndarray:
    """The value of every code, float32 ``[16]`` or ``[256]``; not finite where E4M3 has no number."""
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
    """The values in every byte of packed codes, float32 ``[256, codes in a byte]``, the code of the low bits first."""
    values = table_of(code)
    every = np.arange(256)
    found = values[every][:, None] if bits_of(code) == 8 else np.stack([values[every & 15], values[every >> 4]], axis=1)
    found.setflags(write=False)
    return found
