"""What kernels reach of a device's peaks, from how long they were measured to take: matrix products, attention, vector kernels.

The constants of a device's kernels are fitted to them as those of a whole step are to steps (``calibrate.py``); what is fitted
is only what some kernel speaks about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import ATTENTION, MATRIX, VECTOR, Kind, Operator
from mindllm.timing.device import Device
from mindllm.timing.measured.calibrate import Calibration, fitted

SPOKEN_OF: dict[Kind, tuple[str, ...]] = {
    MATRIX: ("matrix", "half_size"),
    ATTENTION: ("attention",),
    VECTOR: ("memory", "launch"),
}
"""Constants of a device that kernels of a class tell, by their names in ``calibrate.constants``."""
SPREAD = 0.05  # of kernels around the roofline, as a logarithm


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran ``count`` times, in ``seconds`` each (their median)."""

    operator: Operator
    seconds: float
    count: int = 1


def told_by(kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """Names of the constants that these kernels tell."""
    kinds = Counter(kernel.operator.kind for kernel in kernels)
    return tuple(name for kind, names in SPOKEN_OF.items() if kinds[kind] for name in names)


def fit_kernels(device: Device, kernels: Sequence[Kernel], source: str) -> Calibration:
    """Fits what ``kernels`` tell; one counts by the time that it took in all."""
    spent = np.array([kernel.seconds * kernel.count for kernel in kernels])
    weights = np.sqrt(spent / spent.mean())
    measured = np.array([kernel.seconds for kernel in kernels])

    def predicted(devices: Sequence[Device]) -> np.ndarray:
        return np.array([[operator_seconds(kernel.operator, one) for one in devices] for kernel in kernels])

    return fitted(device, told_by(kernels), predicted, measured, source, SPREAD / weights)


def kernel_errors(device: Device, kernels: Sequence[Kernel]) -> np.ndarray:
    """Predicted over measured, less one, ``[kernels]``."""
    return np.array([operator_seconds(kernel.operator, device) / kernel.seconds - 1 for kernel in kernels])


def errors_left_out(device: Device, kernels: Sequence[Kernel]) -> np.ndarray:
    """Errors of every kernel by a device that was fitted to the half which it is not in, ``[kernels]``."""
    found = np.zeros(len(kernels))
    for start in (0, 1):
        given = kernels[1 - start :: 2]
        judge = fit_kernels(device, given, "the other kernels").device if given else device
        found[start::2] = kernel_errors(judge, kernels[start::2])
    return found
