"""How long an operator takes: a roofline (Williams et al., 2009) whose peaks are what kernels of its class and size reach.

| class | seconds |
|---|---|
| matrix products of [m, k] x [k, n] | ``max(operations / (peak · share) · small, bytes / (bandwidth · share))`` |
| attention in one kernel | ``max(operations / (peak · share) · narrow, bytes / (bandwidth · share))``, and masks |
| vector operators | ``max(operations / (vector rate · share), bytes / (bandwidth · share))`` |

and ``launch`` for each. ``small`` is ``1 + half_size (1/m + 1/k + 1/n)``, ``narrow`` is ``attention_head`` over the numbers of a
head, until products take longer.

Attention's kernel of Ascend 910B2 reaches less than half of the peak at heads of 128: the softmax of a score, which vector cores
compute, takes longer than its products. A score of a narrower head has fewer products and the same softmax.

A mask of every pair of tokens is not hidden behind products: the vector cores, which the softmax keeps busy already, copy the
mask of a tile, wait for it and choose by it (``CopyInAttenMask`` and ``SelectWithBytesMask`` of Ascend's
``flash_attention_score_s1s2_bn2gs1.h``). With a compressed causal mask (``sparse_mode`` 2) tiles below the diagonal do neither
(``NO_NEED_COMPUTE_MODE``, same file). Tiles above it are left out either way (``GetSparseInfo`` of its tiling).
"""

from __future__ import annotations

from mindllm.timing.costs.work import ATTENTION, FP32_BYTES, HALF_BYTES, HALVES, MATRIX, Operator
from mindllm.timing.device import Device

TENSORS = 3  # of a product
MASK_OPERATIONS = 8.0
"""Of a vector unit in half precision, two a lane, to apply a byte of a mask: a cast to half, a comparison, and a choice in single
precision, which takes two lanes."""


def operator_seconds(one: Operator, device: Device) -> float:
    """Seconds of one run."""
    reached = device.efficiency
    seconds = one.bytes / (device.memory_bandwidth.value * reached.memory.value)
    if one.kind == MATRIX:
        size = 1.0 + reached.half_size.value * sum(1.0 / side for side in one.sizes)
        peak = device.matrix_rate(one.dtype) * reached.matrix.value
        seconds = max(seconds, one.flops / peak * size) + cast_seconds(one, device)
    elif one.kind == ATTENTION:
        seconds = max(seconds, attention_seconds(one, device)) + mask_seconds(one.masked, device)
    else:
        seconds = max(seconds, one.flops / (device.vector_flops.value * reached.vector.value))
    return seconds + reached.launch.value


def cast_seconds(one: Operator, device: Device) -> float:
    """Seconds in which a CPU, which has no products in half precision, casts both operands of one, and back what it yields."""
    if device.software != "cpu" or one.dtype not in HALVES:
        return 0.0
    traffic, reached = one.bytes * (HALF_BYTES + FP32_BYTES) / HALF_BYTES, device.efficiency
    share = {"float16": reached.float16_casts, "bfloat16": reached.bfloat16_casts}[one.dtype] or reached.memory
    return traffic / (device.memory_bandwidth.value * share.value) + TENSORS * reached.launch.value


def attention_seconds(one: Operator, device: Device) -> float:
    """Seconds of the products and the softmax of attention in one kernel."""
    reached, peak = device.efficiency, device.matrix_rate(one.dtype)
    measured_at = reached.attention_head
    if measured_at is None or not one.head:
        return one.flops / (peak * reached.attention.value)
    softmax = one.flops * measured_at.value / one.head / reached.attention.value
    return max(softmax, one.flops / reached.matrix.value) / peak


def mask_seconds(scores: float, device: Device) -> float:
    """Seconds to read a byte for each score and to choose by it."""
    read = scores / (device.memory_bandwidth.value * device.efficiency.memory.value)
    return max(read, MASK_OPERATIONS * scores / (device.vector_flops.value * device.efficiency.vector.value))
