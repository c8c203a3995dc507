"""Checkpoints: whole or absent on the disk, verified when read, the newest few kept; the same for one process and for many.

**Writing.** ``store.save(step, held, state)``, where ``held`` gives what the ranks of this process keep:
``{rank: RankTensors(weights, optimizer)}``. A process per rank gives its own rank, a process that executes all ranks gives all. A
tensor is a whole one (an array, or what becomes one), or a ``Part(shape, slices, value, replica)``: where the value lies in the
whole, and how many ranks before this one keep the same part (0: this rank writes it). Several processes pass
``CheckpointStore(..., peers=Peers(rank, count, token, agree))`` and all call ``save``: each writes its files, the first one waits
for all and writes the manifest. They meet on the shared file system alone, so it works while they compute (``SavingThread``).

**Reading.** ``load_checkpoint(path, peers=...)`` verifies (each process a share of the files) and reads headers only.
``checkpoint.slice(name, offsets, shape)`` reads a block of a tensor, from whole files or from parts of any layout;
``read_slices(source, slices)`` does so of one tensor, also of those ``find_pretrained`` finds in a Hugging Face directory.
"""

from mindllm.train.checkpoint.joint import Peers
from mindllm.train.checkpoint.loading import Checkpoint, load_checkpoint, verify_checkpoint
from mindllm.train.checkpoint.manifest import DamagedCheckpointError
from mindllm.train.checkpoint.parts import Part, RankTensors
from mindllm.train.checkpoint.saving_thread import SavingThread
from mindllm.train.checkpoint.store import CheckpointNotSavedError, CheckpointStore
from mindllm.train.checkpoint.tensors import read_slices

__all__ = [
    "Checkpoint",
    "CheckpointNotSavedError",
    "CheckpointStore",
    "DamagedCheckpointError",
    "Part",
    "Peers",
    "RankTensors",
    "SavingThread",
    "load_checkpoint",
    "read_slices",
    "verify_checkpoint",
]
