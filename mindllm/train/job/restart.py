"""Whether a job that is started again has begun before: then it goes on from its own last checkpoint, whatever its options say.

Without this a restart would begin anew where ``resume_training`` is false, or go on from a checkpoint that the options set aside.
"""

from __future__ import annotations

import os
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.files import atomic_open
from mindllm.launch.job import JOB
from mindllm.train.checkpoint import Checkpoint, CheckpointStore
from mindllm.train.checkpoint.store import AUTO

FILE_NAME = ".job"


def has_begun(config: RunConfig) -> bool:
    """Whether this job has come as far as training in this output directory."""
    job, path = os.environ.get(JOB), Path(config.output_dir) / FILE_NAME
    return bool(job) and path.is_file() and path.read_bytes() == os.fsencode(job or "")


def begin(config: RunConfig, store: CheckpointStore, step: int) -> list[Path]:
    """Sets aside the checkpoints after ``step``, where training starts, and remembers that this job has begun; their paths."""
    moved = store.supersede_after(step)
    if JOB in os.environ and store.peers.is_first:
        with atomic_open(Path(config.output_dir) / FILE_NAME) as file:
            file.write(os.environ[JOB])
    return moved


def checkpoint_to_resume(config: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint this process starts from: the job's own last good one, or what ``resume_training`` says."""
    begun = not store.peers.agree(not (store.peers.is_first and has_begun(config)))  # the first rank knows
    found = store.resume(AUTO) if begun else None
    if found is None and config.resume_training:
        found = store.resume(config.resume_training)
    return found
