"""Crash-safe checkpoints: complete or absent on the disk, verified when read, for one process and for many.

**Writing.** ``store.save(step, ranks, state)`` takes the tensors of this process's ranks:
``{rank: RankTensors(weights, optimizer)}``. A process per rank passes its own rank, a process that executes all ranks passes all.
A tensor is complete (an array, or a lazy one), or a ``Part(shape, slices, value, replica)``: its place in the whole tensor, and
the number of lower ranks with an equal part (0: this rank writes it). Several processes create
``CheckpointStore(..., peers=Peers(rank, count, token, agree))`` and all call ``save``: each writes its files, the first one waits
for all and writes the manifest. They communicate through the shared file system only, so saving works during computation
(``SavingThread``).

**Reading.** ``load_checkpoint(path, peers=...)`` verifies the files (each process a share of them) and reads only headers.
``checkpoint.slice(name, offsets, shape)`` reads a block of a tensor, from files of any layout.
"""

from mindllm.train.checkpoint.joint import Peers
from mindllm.train.checkpoint.loading import Base, Checkpoint, load_checkpoint, verify_checkpoint
from mindllm.train.checkpoint.manifest import DamagedCheckpointError
from mindllm.train.checkpoint.parts import Part, RankTensors
from mindllm.train.checkpoint.store import CheckpointNotSavedError, CheckpointStore, SavingThread
from mindllm.train.checkpoint.tensors import read_slices

__all__ = [
    "Base",
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
