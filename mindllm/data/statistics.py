"""What losses are compared with: bytes of a split (for bits per byte) and the loss of a unigram model (the baseline)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mindllm.data.corpus import CorpusSplit
from mindllm.errors import UserError

CHUNK = 1 << 22  # tokens counted at a time


def byte_count(split: CorpusSplit, tokens: int | None = None) -> float | None:
    """Returns the bytes (UTF-8) of the text of ``split``, or of its first ``tokens`` tokens; of the document that these end in,
    its bytes in proportion.

    They are those noted when the corpus was made; for a corpus without notes, those of its decoded tokens without the ends of
    documents (exact when the tokenizer gives every text back, as byte-level ones do); None when it has no tokenizer either.
    """
    corpus = split.corpus
    shares = np.ones(len(split.documents))
    if tokens is not None and tokens < split.token_count:
        lengths = np.maximum(1, np.diff(split.document_starts))
        shares = np.clip((tokens - split.document_starts[:-1]) / lengths, 0, 1)
    if corpus.byte_counts is not None:
        return float(corpus.byte_counts[split.documents.start : split.documents.stop] @ shares)
    if corpus.tokenizer is None:
        return None
    total = 0.0
    for document, share in zip(split.documents, shares, strict=True):
        if not share:
            break
        ids = corpus.dataset[document]
        if len(ids) and ids[-1] == corpus.eod_id:
            ids = ids[:-1]
        total += share * len(corpus.tokenizer.decode(ids.tolist()).encode("utf-8", errors="replace"))
    return total


def bytes_per_token(splits: Sequence[CorpusSplit], tokens: Sequence[int] | None = None) -> float | None:
    """Returns bytes of text per token of all ``splits``, or of the first ``tokens`` of each; None where they are unknown.

    Ends of documents are tokens of no bytes.
    """
    counts = [split.token_count for split in splits] if tokens is None else tokens
    totals = [byte_count(split, count) for split, count in zip(splits, counts, strict=True)]
    known = [total for total in totals if total is not None]
    return sum(known) / sum(counts) if len(known) == len(totals) else None


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Turns a loss in nats per token into bits per byte of text, which does not depend on the tokenizer."""
    return nats_per_token / (math.log(2) * bytes_per_token)


def unigram_loss(train: Sequence[CorpusSplit], held_out: Sequence[CorpusSplit], vocab_size: int) -> float:
    """Returns the nats per token of ``held_out`` under the token frequencies of ``train``, one added to each count."""
    counts = _token_counts(train, vocab_size) + 1
    log_probabilities = np.log(counts) - math.log(counts.sum())
    found = _token_counts(held_out, vocab_size)
    return float(-(found @ log_probabilities) / found.sum())


def _token_counts(splits: Sequence[CorpusSplit], vocab_size: int) -> np.ndarray:
    """Returns int64 [vocab_size] occurrences of each token."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for split in splits:
        for start in range(0, split.token_count, CHUNK):
            found = np.bincount(split.tokens[start : start + CHUNK], minlength=vocab_size)
            if len(found) > vocab_size:
                raise UserError(f"{split}: holds token {len(found) - 1}, but vocab_size is {vocab_size}")
            counts += found
    return counts
