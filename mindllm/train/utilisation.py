"""How much of the device's arithmetic a run uses: model FLOPs utilisation (Chowdhery et al., 2022, appendix B)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
from mindspore import Tensor
from mindspore import ops as P

PEAK_FLOPS = {"Ascend": 376e12}  # Atlas 800T A2 (Ascend 910B), dense bf16/fp16, vendor's data sheet
REPEATS = 3  # measurements of a peak beyond the first
logger = logging.getLogger(__name__)


class Peak:
    """Peak FLOP/s of one device: of a data sheet, or, where ``measure`` is given, what a matrix product reached.

    A run may begin while the machine has other work, and the peak is then too low. A step that beats it proves that: it is
    measured again, :data:`REPEATS` times at most. ``quiet`` is that of a simulation, whose steps compute nothing.
    """

    def __init__(self, flops: float, measure: Callable[[], float] | None = None, quiet: bool = False) -> None:
        self.flops = flops
        self.measure = measure
        self.left = REPEATS if measure else 0
        self.told = quiet

    def share(self, rate: float) -> float:
        """Model FLOPs utilisation of so many FLOP/s. More than all of the device is told once: the figure cannot be believed."""
        while rate > self.flops and self.measure and self.left:
            self.left -= 1
            self.flops = max(self.flops, self.measure())
        if rate > self.flops and not self.told:
            self.told = True
            logger.warning(
                "mfu %.0f%% is more than a device has: its peak, %.3g FLOP/s %s, is too low; do not trust mfu in this run",
                100 * rate / self.flops, self.flops, "as measured on a busy machine" if self.measure else "of the data sheet",
            )  # fmt: skip
        return rate / self.flops


def peak_of(device_target: str, simulated: bool = False) -> Peak:
    """That of the data sheet, or, on a CPU, that of a large fp32 matrix product measured now."""
    if device_target in PEAK_FLOPS:
        return Peak(PEAK_FLOPS[device_target], quiet=simulated)
    return Peak(_measured_matmul_rate(), _measured_matmul_rate)


def _measured_matmul_rate(rows: int = 512, inner: int = 2048, repeats: int = 10) -> float:
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
