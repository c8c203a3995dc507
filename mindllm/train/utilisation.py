"""How much of the device's arithmetic a run uses: model FLOPs utilisation (Chowdhery et al., 2022, appendix B)."""

from __future__ import annotations

import time

import numpy as np

PEAK_FLOPS = {"Ascend": 376e12}  # Atlas 800T A2 (Ascend 910B), dense bf16/fp16, vendor's data sheet


def peak_flops(device_target: str) -> float:
    """Peak FLOP/s of one device: of the data sheet, or, on a CPU, that of a large fp32 matrix product measured now."""
    return PEAK_FLOPS[device_target] if device_target in PEAK_FLOPS else _measured_matmul_rate()


def _measured_matmul_rate(size: int = 1536, repeats: int = 3) -> float:
    """The best of a few products ``[size, size]²`` in fp32, with the threads numpy's library uses, in FLOP/s."""
    matrix = np.ones((size, size), np.float32)
    matrix @ matrix
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)
