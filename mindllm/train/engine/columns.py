"""The columns of a batch as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from mindllm.parallel.context import COLUMNS, DOCUMENT_COLUMNS
from mindllm.random_keys import RANDOM_KEYS
from mindllm.train.engine.engine import Batch


def inputs(batch: Batch, columns: Sequence[str] = COLUMNS) -> tuple[Tensor, ...]:
    """These columns."""
    return tuple(map(Tensor, completed(batch, columns).values()))


def completed(batch: Batch, columns: Sequence[str]) -> Batch:
    """These columns, in their order; where a batch has none about documents, every row is one."""
    rows, length = batch["input_ids"].shape
    one_document = {
        "segment_starts": np.zeros((rows, length), np.int32),
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }
    return {name: batch[name] if name in batch else one_document[name] for name in columns}


FURTHER = 3  # what a step takes beside rows, rate and scale: the columns of documents, and keys of dropout


def further_inputs(batch: Batch, training: bool = True) -> tuple[Tensor | None, ...]:
    """``segment_starts`` and ``position_ids``, and in training ``random_keys``; without those at the end that the batch has
    not, as that is a graph without them.
    """
    names = [*DOCUMENT_COLUMNS, *([RANDOM_KEYS] if training else [])]
    while names and names[-1] not in batch:
        names.pop()
    return tuple(Tensor(batch[name]) if name in batch else None for name in names)


def parts(batch: Batch, count: int) -> list[Batch]:
    """Cuts a batch into ``count`` equal parts of consecutive rows."""
    pieces = {name: np.split(array, count) for name, array in batch.items()}
    return [{name: pieces[name][index] for name in pieces} for index in range(count)]
