"""Columns of a batch as input tensors of a compiled step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from mindllm.parallel.context import COLUMNS, DOCUMENT_COLUMNS
from mindllm.random_keys import RANDOM_KEYS
from mindllm.train.engine.engine import Batch


def inputs(batch: Batch, columns: Sequence[str] = COLUMNS) -> tuple[Tensor, ...]:
    """Return the columns as tensors, with defaults for missing document columns."""
    return tuple(map(Tensor, with_document_columns(batch, columns).values()))


def with_document_columns(batch: Batch, columns: Sequence[str]) -> Batch:
    """Return the columns in order. A batch without document columns has one document per row."""
    rows, length = batch["input_ids"].shape
    one_document = {
        "segment_starts": np.zeros((rows, length), np.int32),
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }
    return {name: batch[name] if name in batch else one_document[name] for name in columns}


OPTIONAL_INPUTS = 3  # segment_starts, position_ids, random_keys


def optional_inputs(batch: Batch, training: bool = True) -> tuple[Tensor | None, ...]:
    """Return ``segment_starts``, ``position_ids`` and, in training, ``random_keys``.

    Trailing columns that the batch does not have are left out, so that the graph is compiled without them.
    """
    names = [*DOCUMENT_COLUMNS, *([RANDOM_KEYS] if training else [])]
    while names and names[-1] not in batch:
        names.pop()
    return tuple(Tensor(batch[name]) if name in batch else None for name in names)


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into ``count`` equal parts of consecutive rows."""
    pieces = {name: np.split(array, count) for name, array in batch.items()}
    return [{name: pieces[name][index] for name in pieces} for index in range(count)]
