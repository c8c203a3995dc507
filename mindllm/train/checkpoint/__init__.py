"""Checkpoints: whole or absent on the disk, verified when read, the newest few kept."""

from mindllm.train.checkpoint.loading import Checkpoint, load_checkpoint, verify_checkpoint
from mindllm.train.checkpoint.manifest import DamagedCheckpointError
from mindllm.train.checkpoint.store import CheckpointNotSavedError, CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointNotSavedError",
    "CheckpointStore",
    "DamagedCheckpointError",
    "load_checkpoint",
    "verify_checkpoint",
]
