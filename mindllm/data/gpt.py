"""Samples for pretraining: documents in shuffled order, joined, split into sequences, drawn in shuffled order.

The scheme is Megatron's (Shoeybi et al. 2019; ``megatron/core/datasets/gpt_dataset.py``) over an endless stream of epochs, each
with a different order of documents. Sequences follow each other without gap or overlap. Every token is the label of exactly one
sample per epoch, also between epochs, and sample i does not depend on the length of a run.

Evaluation samples are a split from its first token to its last, in order; every token is predicted exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mindllm.data.corpus import CorpusSplit
from mindllm.data.documents import DOCUMENTS, SAMPLES, DocumentOptions, permutation
from mindllm.errors import UserError


@dataclass(frozen=True)
class DocumentOrder:
    """The order of documents in one epoch: ``documents`` [n] and where each ``starts`` in the epoch, int64 [n + 1]."""

    documents: np.ndarray
    starts: np.ndarray


class GPTDataset:
    """Samples of ``seq_length`` tokens and their labels, numbered from 0 without end.

    Sample i is a function of the documents, ``seed``, ``seq_length`` and i. ``options`` say how documents are kept apart in
    it. Memory: the orders of up to three epochs' documents (12 bytes per document) and of two epochs' samples (4 bytes per
    sample), made when an epoch begins.
    """

    sample_count = None  # endless

    def __init__(self, split: CorpusSplit, seq_length: int, seed: int, options: DocumentOptions | None = None) -> None:
        self.split = split
        self.seq_length = seq_length
        self.seed = seed
        self.options = options or DocumentOptions()
        self._lengths = np.diff(split.document_starts)
        self._document_order = lru_cache(maxsize=3)(self._shuffle_documents)
        self._sample_order = lru_cache(maxsize=2)(self._shuffle_samples)

    @property
    def samples_per_epoch(self) -> int:
        """Return the complete samples in the tokens of the split; at least 1."""
        return max(1, self.split.token_count // self.seq_length)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return int32 [seq_length + 1] tokens of sample ``index``: inputs are all but the last, labels all but the first."""
        epoch = index * self.seq_length // self.split.token_count
        order = self._sample_order(epoch)
        first = self._first_sample(epoch)
        # copy seq_length + 1 tokens of the endless stream from position on
        position = (first + int(order[index - first])) * self.seq_length
        tokens = np.empty(self.seq_length + 1, dtype=np.int32)
        filled = 0
        while filled < len(tokens):
            epoch, offset = divmod(position + filled, self.split.token_count)
            filled += self._read_epoch(self._document_order(epoch), offset, tokens[filled:])
        return tokens

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Return input_ids, labels int32, loss_mask float32 and the columns of ``options``, all [seq_length], of a sample."""
        tokens = self[index]
        columns = self.options.columns(tokens[:-1], np.ones(self.seq_length, dtype=np.float32))
        return {"input_ids": tokens[:-1], "labels": tokens[1:], **columns}

    def _first_sample(self, epoch: int) -> int:
        """Return the first sample that begins in ``epoch``; the last one before it may end there."""
        return -(-epoch * self.split.token_count // self.seq_length)

    def _read_epoch(self, order: DocumentOrder, offset: int, tokens: np.ndarray) -> int:
        """Fill ``tokens`` from ``offset`` of an epoch on, as far as the epoch goes; returns how many it filled."""
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
        documents = permutation(len(self._lengths), self.seed, epoch, DOCUMENTS)
        starts = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum(self._lengths[documents], out=starts[1:])
        return DocumentOrder(documents, starts)

    def _shuffle_samples(self, epoch: int) -> np.ndarray:
        count = self._first_sample(epoch + 1) - self._first_sample(epoch)
        return permutation(count, self.seed, epoch, SAMPLES)


class HeldOutDataset:
    """The tokens of a split cut into sequences of ``seq_length`` labels; the last one is padded and its padding has no loss.

    The first token is predicted from ``eod_id``, as every other document's is; without one it is the only token not predicted.
    So the loss summed over all samples is that of the whole split, and divides by its bytes. ``options`` are those of training,
    but that every token counts, also with ``eod_mask_loss``.
    """

    def __init__(self, split: CorpusSplit, seq_length: int, options: DocumentOptions | None = None) -> None:
        self.split = split
        self.seq_length = seq_length
        self.options = replace(options or DocumentOptions(), eod_mask_loss=False)
        self._before = [] if self.options.eod_id is None else [self.options.eod_id]
        if not self.token_count:
            raise UserError(f"{split}: has one token and nothing to predict it from; give the split a larger weight")

    @property
    def token_count(self) -> int:
        """Return the number of predicted tokens."""
        return self.split.token_count - 1 + len(self._before)

    @property
    def sample_count(self) -> int:
        """Return the number of samples, including the padded one."""
        return -(-self.token_count // self.seq_length)

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``, with the columns of ``GPTDataset.sample``; past the end everything is padding."""
        start = index * self.seq_length
        stream = np.zeros(self.seq_length + 1, dtype=np.int32)
        before = self._before if start == 0 else []
        first = start - len(self._before) + len(before)
        text = self.split.tokens[first : first + len(stream) - len(before)]
        count = len(before) + len(text)
        stream[:count] = [*before, *text] if before else text
        loss_mask = np.zeros(self.seq_length, dtype=np.float32)
        loss_mask[: max(0, count - 1)] = 1.0
        return {"input_ids": stream[:-1], "labels": stream[1:], **self.options.columns(stream[:-1], loss_mask)}
