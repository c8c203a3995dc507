"""Separation of the documents in a sample (losses, positions, attention), and orders drawn from a seed.

The options have the meaning of Megatron-LM (``megatron/training/utils.py``, ``get_ltor_masks_and_position_ids``): a document ends
with its end-of-document token, and a part of a document in a sample is a document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindllm.errors import UserError


@dataclass(frozen=True)
class DocumentOptions:
    """Columns of a sample that depend on ends of documents; each of them needs ``eod_id``."""

    eod_id: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False

    def __post_init__(self) -> None:
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(self, name) and self.eod_id is None:
                raise UserError(f"{name} needs an end-of-document token, and the corpus has none; set it to false")

    def columns(self, inputs: np.ndarray, loss_mask: np.ndarray) -> dict[str, np.ndarray]:
        """Return loss_mask float32 and, if enabled, segment_starts and position_ids int32 of ``inputs``; all [seq]."""
        columns = {"loss_mask": loss_mask}
        if self.eod_mask_loss:
            columns["loss_mask"] = np.where(inputs == self.eod_id, np.float32(0.0), loss_mask)
        if self.reset_attention_mask:
            columns["segment_starts"] = segment_starts(inputs == self.eod_id)
        if self.reset_position_ids:
            columns["position_ids"] = positions(segment_starts(inputs == self.eod_id))
        return columns


def segment_starts(ends: np.ndarray) -> np.ndarray:
    """Return where the document of each token begins, int32 [seq], from ``ends``: bool [seq], last tokens of documents."""
    first = np.zeros(len(ends), dtype=np.int32)
    first[1:] = np.where(ends[:-1], np.arange(1, len(ends), dtype=np.int32), 0)
    return np.maximum.accumulate(first)


def positions(starts: np.ndarray) -> np.ndarray:
    """Return the position of each token in its document, from ``segment_starts``; int32 [seq]."""
    return np.arange(len(starts), dtype=np.int32) - starts


DOCUMENTS, SAMPLES, PACKS = 0, 1, 2  # what an order is for


def permutation(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """Return a permutation of ``count`` (int32 or int64) that depends on the given numbers only.

    It uses RandomState, whose numbers do not change between numpy versions, unlike those of Generator.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch, purpose]
    order = np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)
    np.random.RandomState(words).shuffle(order)
    return order
