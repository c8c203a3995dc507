"""How large checkpoints are, from the architecture."""

from __future__ import annotations

from mindllm.config import RunConfig
from mindllm.config.callbacks import CheckpointMonitorConfig

STATE_BYTES = 12  # per parameter: the weight and two moments in fp32


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of one checkpoint: weights that are trained, and their optimizer state."""
    return STATE_BYTES * config.model.config.architecture.trained_parameter_count()


def kept_checkpoints(config: RunConfig) -> int:
    """Return how many are kept at most; one where the run names no number."""
    kept = [item.keep_checkpoint_max for item in config.callbacks if isinstance(item, CheckpointMonitorConfig)]
    return max(kept, default=1)
