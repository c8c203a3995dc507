"""How much of the device's arithmetic a run uses: model FLOPs utilisation (Chowdhery et al., 2022, appendix B)."""

from __future__ import annotations

import time

import numpy as np
from mindspore import Tensor
from mindspore import ops as P

PEAK_FLOPS = {"Ascend": 376e12}  # Atlas 800T A2 (Ascend 910B), dense bf16/fp16, vendor's data sheet


def peak_flops(device_target: str) -> float:
    """Peak FLOP/s of one device: of the data sheet, or, on a CPU, that of a large fp32 matrix product measured now."""
    return PEAK_FLOPS[device_target] if device_target in PEAK_FLOPS else _measured_matmul_rate()


def _measured_matmul_rate(rows: int = 1024, inner: int = 4096, repeats: int = 10) -> float:
    """FLOP/s of the best of a few products ``[rows, inner] x [inner, rows]`` in fp32, by the kernel and threads that train."""
    matrix = Tensor(np.ones((rows, inner), np.float32))
    product = P.MatMul(transpose_b=True)
    product(matrix, matrix).asnumpy()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product(matrix, matrix).asnumpy()
        seconds.append(time.perf_counter() - start)
    return 2.0 * rows * rows * inner / min(seconds)
