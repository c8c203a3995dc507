"""Restart of a job: a job that has started training resumes from its own last checkpoint, regardless of its options.

Otherwise a restart would train from scratch if ``resume_training`` is false, or resume from a checkpoint that the options ruled
out.
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


def has_started(config: RunConfig) -> bool:
    """Return True if this job has started training in this output directory before."""
    job, path = os.environ.get(JOB), Path(config.output_dir) / FILE_NAME
    return bool(job) and path.is_file() and path.read_bytes() == os.fsencode(job or "")


def mark_started(config: RunConfig, store: CheckpointStore, step: int) -> list[Path]:
    """Record that this job has started, and return the checkpoints after ``step``, which are moved out of the way."""
    moved = store.supersede_after(step)
    if JOB in os.environ and store.peers.is_first:
        with atomic_open(Path(config.output_dir) / FILE_NAME) as file:
            file.write(os.environ[JOB])
    return moved


def checkpoint_to_resume(config: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """Return the checkpoint to start from: the job's own last good one, otherwise the one of ``resume_training``."""
    # Only the first rank reads the marker, so that all ranks decide alike.
    started = not store.peers.agree(not (store.peers.is_first and has_started(config)))
    checkpoint = store.resume(AUTO) if started else None
    if checkpoint is None and config.resume_training:
        checkpoint = store.resume(config.resume_training)
    return checkpoint
