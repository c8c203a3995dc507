"""Model FLOPs utilization of a device (Chowdhery et al., 2022, appendix B)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
from mindspore import Tensor
from mindspore import ops as P

PEAK_FLOPS = {"Ascend": 376e12}  # Atlas 800T A2 (Ascend 910B), dense bf16 and fp16, data sheet
MAX_REMEASUREMENTS = 3
logger = logging.getLogger(__name__)


class Peak:
    """Peak FLOP/s of one device, from its data sheet or, with ``measure``, from a matrix product.

    A measured peak is too low if the machine was busy. If a step exceeds it, it is measured again, at most
    :data:`MAX_REMEASUREMENTS` times. ``quiet`` disables the warning, for simulations, whose steps compute nothing.
    """

    def __init__(self, flops: float, measure: Callable[[], float] | None = None, quiet: bool = False) -> None:
        self.flops = flops
        self.measure = measure
        self.remaining_measurements = MAX_REMEASUREMENTS if measure else 0
        self.has_warned = quiet

    def share(self, rate: float) -> float:
        """Return ``rate`` FLOP/s as a share of the peak. Warns once if that is above 1."""
        while rate > self.flops and self.measure and self.remaining_measurements:
            self.remaining_measurements -= 1
            self.flops = max(self.flops, self.measure())
        if rate > self.flops and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "mfu %.0f%% is above 100%%: the peak of %.3g FLOP/s %s is too low; ignore mfu in this run",
                100 * rate / self.flops, self.flops, "(measured on a busy machine)" if self.measure else "(data sheet)",
            )  # fmt: skip
        return rate / self.flops


def peak_of(device_target: str, simulated: bool = False) -> Peak:
    """Return the peak of the data sheet; for a CPU the rate of a large fp32 matrix product, measured now."""
    if device_target in PEAK_FLOPS:
        return Peak(PEAK_FLOPS[device_target], quiet=simulated)
    return Peak(_measure_matmul_rate(), _measure_matmul_rate)


def _measure_matmul_rate(rows: int = 512, inner: int = 2048, repeats: int = 10) -> float:
    """Return the best FLOP/s of a few fp32 products ``[rows, inner] x [inner, rows]``, with the kernel that training uses."""
    matrix = Tensor(np.ones((rows, inner), np.float32))
    product = P.MatMul(transpose_b=True)
    product(matrix, matrix).asnumpy()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product(matrix, matrix).asnumpy()
        seconds.append(time.perf_counter() - start)
    return 2.0 * rows * rows * inner / min(seconds)
