"""The columns of a batch as tensors."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from mindllm.train.engine.engine import Batch


def inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """``input_ids``, ``labels``, ``loss_mask``."""
    return Tensor(batch["input_ids"]), Tensor(batch["labels"]), Tensor(batch["loss_mask"])


def document_columns(batch: Batch) -> tuple[Tensor | None, ...]:
    """``segment_starts`` and ``position_ids``; nothing where the batch has neither, as that is a graph without them."""
    columns = [batch.get(name) for name in ("segment_starts", "position_ids")]
    if not any(column is not None for column in columns):
        return ()
    return tuple(None if column is None else Tensor(column) for column in columns)


def parts(batch: Batch, count: int) -> list[Batch]:
    """Cuts a batch into ``count`` equal parts of consecutive rows."""
    pieces = {name: np.split(array, count) for name, array in batch.items()}
    return [{name: pieces[name][index] for name in pieces} for index in range(count)]
