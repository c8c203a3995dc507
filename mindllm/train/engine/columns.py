"""The columns of a batch as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from mindllm.data.random_keys import RANDOM_KEYS
from mindllm.parallel.context import COLUMNS
from mindllm.train.engine.engine import Batch

DOCUMENT_COLUMNS = ("segment_starts", "position_ids")


def inputs(batch: Batch, columns: Sequence[str] = COLUMNS) -> tuple[Tensor, ...]:
    """These columns."""
    return tuple(Tensor(batch[name]) for name in columns)


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
