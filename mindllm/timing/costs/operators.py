"""How long an operator takes: a roofline (Williams et al., 2009) whose peaks are what kernels of its class and size reach.

| class | seconds |
|---|---|
| matrix products of [m, k] x [k, n] | ``max(operations / (peak · share) · small, bytes / (bandwidth · share))`` |
| attention in one kernel | ``max(operations / (peak · share), bytes / (bandwidth · share))`` |
| vector operators | ``max(operations / (vector rate · share), bytes / (bandwidth · share))`` |

and ``launch`` for each. ``small`` is ``1 + half_size (1/m + 1/k + 1/n)``.
"""

from __future__ import annotations

from mindllm.timing.costs.work import ATTENTION, MATRIX, Operator
from mindllm.timing.device import Device


def operator_seconds(one: Operator, device: Device) -> float:
    """Seconds of one run."""
    reached = device.efficiency
    seconds = one.bytes / (device.memory_bandwidth.value * reached.memory.value)
    if one.kind == MATRIX:
        size = 1.0 + reached.half_size.value * sum(1.0 / side for side in one.sizes)
        peak = device.matrix_rate(one.dtype) * reached.matrix.value
        seconds = max(seconds, one.flops / peak * size)
    elif one.kind == ATTENTION:
        seconds = max(seconds, one.flops / (device.matrix_rate(one.dtype) * reached.attention.value))
    else:
        seconds = max(seconds, one.flops / (device.vector_flops.value * reached.vector.value))
    return seconds + reached.launch.value
