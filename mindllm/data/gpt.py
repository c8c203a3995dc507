"""Samples for pretraining: documents in shuffled order, joined, cut into sequences, drawn in shuffled order.

The scheme is Megatron's (Shoeybi et al. 2019; ``megatron/core/datasets/gpt_dataset.py``) over an endless stream: epoch follows
epoch, each with its own order of documents, and the sequences lie on the stream without gap or overlap. So every token is the
label of exactly one sample per epoch (none is dropped where epochs meet), and sample i does not depend on the length of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mindllm.data.corpus import CorpusSplit
from mindllm.errors import UserError

DOCUMENTS, SAMPLES = 0, 1  # what a random state is for


@dataclass(frozen=True)
class DocumentOrder:
    """The order of documents in one epoch: ``documents`` [n] and where each ``starts`` in the epoch, int64 [n + 1]."""

    documents: np.ndarray
    starts: np.ndarray


class GPTDataset:
    """Samples of ``seq_length`` tokens and their labels, numbered from 0 without end.

    Sample i is a function of the documents, ``seed``, ``seq_length`` and i. With ``eod_mask_loss``, the prediction that follows
    an ``eod_id`` (the first token of the next document) has no loss. Memory: the orders of up to three epochs' documents
    (12 bytes per document) and of two epochs' samples (4 bytes per sample), made when an epoch begins.
    """

    sample_count = None  # endless

    def __init__(
        self, split: CorpusSplit, seq_length: int, seed: int, *, eod_id: int | None = None, eod_mask_loss: bool = False
    ) -> None:
        if eod_mask_loss and eod_id is None:
            raise UserError(
                f"{split}: eod_mask_loss needs an end-of-document token, and the corpus has none; set it to False"
            )
        self.split = split
        self.seq_length = seq_length
        self.seed = seed
        self._masked_id = eod_id if eod_mask_loss else None
        self._lengths = np.diff(split.document_starts)
        self._document_order = lru_cache(maxsize=3)(self._shuffle_documents)
        self._sample_order = lru_cache(maxsize=2)(self._shuffle_samples)

    @property
    def samples_per_epoch(self) -> int:
        """Whole samples in the tokens of the split; at least 1."""
        return max(1, self.split.token_count // self.seq_length)

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns int32 [seq_length + 1] tokens of sample ``index``: inputs are all but the last, labels all but the first."""
        epoch = index * self.seq_length // self.split.token_count
        order = self._sample_order(epoch)
        first = self._first_sample(epoch)
        return self._read((first + int(order[index - first])) * self.seq_length)

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Returns input_ids int32 [seq_length], labels int32 [seq_length], loss_mask float32 [seq_length] of sample ``index``."""
        tokens = self[index]
        loss_mask = np.ones(self.seq_length, dtype=np.float32)
        if self._masked_id is not None:
            loss_mask[tokens[:-1] == self._masked_id] = 0.0
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "loss_mask": loss_mask}

    def _first_sample(self, epoch: int) -> int:
        """Returns the first sample that begins in ``epoch``; the last one before it may end there."""
        return -(-epoch * self.split.token_count // self.seq_length)

    def _read(self, position: int) -> np.ndarray:
        """Copies seq_length + 1 tokens of the endless stream from ``position`` on."""
        tokens = np.empty(self.seq_length + 1, dtype=np.int32)
        filled = 0
        while filled < len(tokens):
            epoch, offset = divmod(position + filled, self.split.token_count)
            filled += self._read_epoch(self._document_order(epoch), offset, tokens[filled:])
        return tokens

    def _read_epoch(self, order: DocumentOrder, offset: int, tokens: np.ndarray) -> int:
        """Fills ``tokens`` from ``offset`` of an epoch on, as far as the epoch goes; returns how many it filled."""
        filled = 0
        place = int(np.searchsorted(order.starts, offset, side="right")) - 1
        while filled < len(tokens) and place < len(order.documents):
            start = self.split.document_starts[order.documents[place]] + (offset + filled - order.starts[place])
            count = min(len(tokens) - filled, int(order.starts[place + 1]) - offset - filled)
            tokens[filled : filled + count] = self.split.tokens[start : start + count]
            filled += count
            place += 1
        return filled

    def _shuffle_documents(self, epoch: int) -> DocumentOrder:
        documents = self._permutation(len(self._lengths), epoch, DOCUMENTS)
        starts = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum(self._lengths[documents], out=starts[1:])
        return DocumentOrder(documents, starts)

    def _shuffle_samples(self, epoch: int) -> np.ndarray:
        return self._permutation(self._first_sample(epoch + 1) - self._first_sample(epoch), epoch, SAMPLES)

    def _permutation(self, count: int, epoch: int, purpose: int) -> np.ndarray:
        """Returns a permutation of ``count``; by RandomState, whose numbers numpy freezes, which Generator's are not."""
        words = [self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, epoch, purpose]
        order = np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)
        np.random.RandomState(words).shuffle(order)
        return order
