"""How the documents that meet in one sample are kept apart: losses, positions, attention.

The options and their meaning are Megatron-LM's (``megatron/training/utils.py``, ``get_ltor_masks_and_position_ids``): a document
ends with its end-of-document token, which belongs to it, and what a sample holds of a document is the document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindllm.errors import UserError


@dataclass(frozen=True)
class DocumentOptions:
    """Which traces of document ends a sample carries; any of them needs ``eod_id``."""

    eod_id: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False

    def __post_init__(self) -> None:
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(self, name) and self.eod_id is None:
                raise UserError(f"{name} needs an end-of-document token, and the corpus has none; set it to false")

    def columns(self, inputs: np.ndarray, loss_mask: np.ndarray) -> dict[str, np.ndarray]:
        """Returns loss_mask float32 and, where asked for, segment_starts and position_ids int32 of ``inputs``; all [seq]."""
        columns = {"loss_mask": loss_mask}
        if self.eod_mask_loss:
            columns["loss_mask"] = np.where(inputs == self.eod_id, np.float32(0.0), loss_mask)
        if self.reset_attention_mask:
            columns["segment_starts"] = segment_starts(inputs == self.eod_id)
        if self.reset_position_ids:
            columns["position_ids"] = positions(segment_starts(inputs == self.eod_id))
        return columns


def segment_starts(ends: np.ndarray) -> np.ndarray:
    """Returns where the document of each token begins, int32 [seq], from ``ends``: bool [seq], last tokens of documents."""
    first = np.zeros(len(ends), dtype=np.int32)
    first[1:] = np.where(ends[:-1], np.arange(1, len(ends), dtype=np.int32), 0)
    return np.maximum.accumulate(first)


def positions(starts: np.ndarray) -> np.ndarray:
    """Returns the position of each token in its document, from ``segment_starts``; int32 [seq]."""
    return np.arange(len(starts), dtype=np.int32) - starts


DOCUMENTS, SAMPLES, PACKS = 0, 1, 2  # what an order is for


def permutation(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """Returns a permutation of ``count`` (int32 or int64), a function of the numbers given and of nothing else.

    By RandomState, whose numbers numpy freezes, which Generator's are not.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch, purpose]
    order = np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)
    np.random.RandomState(words).shuffle(order)
    return order
