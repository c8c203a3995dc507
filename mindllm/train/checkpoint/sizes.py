"""How large checkpoints are, from the architecture."""

from __future__ import annotations

import math

from mindllm.config import RunConfig
from mindllm.config.callbacks import CheckpointMonitorConfig

FP32_BYTES, MOMENTS_BYTES = 4, 8


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of one checkpoint: weights that are trained, and their optimizer state."""
    model = config.model.config
    total = (FP32_BYTES + MOMENTS_BYTES) * model.architecture.trained_parameter_count()
    if model.has_half_parameters:
        shapes = model.architecture.trained_shapes()
        halves = sum(math.prod(shape) for name, shape in shapes.items() if model.parameter_type(name) != "float32")
        total += (FP32_BYTES // 2 if config.optimizer.master_weights else -FP32_BYTES // 2) * halves
    return total


def kept_checkpoints(config: RunConfig) -> int:
    """Return how many are kept at most; one where the run names no number."""
    kept = [item.keep_checkpoint_max for item in config.callbacks if isinstance(item, CheckpointMonitorConfig)]
    return max(kept, default=1)
