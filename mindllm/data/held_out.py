"""Samples for evaluation: a split from its first token to its last, in order, every token predicted exactly once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mindllm.data.corpus import CorpusSplit
from mindllm.data.documents import DocumentOptions
from mindllm.errors import UserError


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
        """Tokens that are predicted."""
        return self.split.token_count - 1 + len(self._before)

    @property
    def sample_count(self) -> int:
        """Samples, the padded one included."""
        return -(-self.token_count // self.seq_length)

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Returns sample ``index``, with the columns of ``GPTDataset.sample``; past the end everything is padding."""
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
