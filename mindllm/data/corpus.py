"""A corpus: an indexed token file, its metadata (``PREFIX.meta.json``, ``PREFIX.bytes.npy``), its splits and statistics.

With the two additional files, a corpus is checked against a tokenizer and losses are converted to bits per byte. A corpus made by
Megatron's own tool loads without them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from mindllm.data.indexed import IndexedDataset, IndexedWriter, bin_path, index_path, smallest_dtype
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError, nearest
from mindllm.outside import read_json

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "949,50,1"


def meta_path(prefix: Path | str) -> Path:
    """Return the path of the metadata of ``prefix``."""
    return Path(f"{prefix}.meta.json")


def byte_counts_path(prefix: Path | str) -> Path:
    """Return the path of the text size of each document of ``prefix``."""
    return Path(f"{prefix}.bytes.npy")


def corpus_files(prefix: Path | str) -> list[Path]:
    """Return all files a corpus may have, the index last."""
    return [bin_path(prefix), byte_counts_path(prefix), meta_path(prefix), index_path(prefix)]


@dataclass(frozen=True)
class CorpusMeta:
    """Content of ``PREFIX.meta.json``. ``bytes`` is the size of the text in UTF-8; ``eod_id`` ends each document, unless None."""

    tokenizer: str  # file name, for messages
    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    documents: int
    tokens: int
    bytes: int
    source_fingerprint: str  # of the inputs and options it was made from


class Corpus:
    """Documents of ``prefix`` with its metadata.

    With ``tokenizer``, raises UserError if the corpus was made with another one. ``meta`` and ``byte_counts`` (int64 [documents])
    are None for a corpus without the additional files.
    """

    def __init__(self, prefix: Path | str, tokenizer: Tokenizer | None = None) -> None:
        self.prefix = Path(prefix)
        self.dataset = IndexedDataset(prefix)
        self.meta = read_meta(prefix)
        self.byte_counts = self._read_byte_counts() if self.meta else None
        self.tokenizer = tokenizer
        if self.meta and (self.meta.documents, self.meta.tokens) != (len(self.dataset), self.dataset.token_count):
            raise UserError(
                f"{meta_path(prefix)}: describes another corpus than {bin_path(prefix).name}; delete it or make all again"
            )
        if self.meta and tokenizer and self.meta.tokenizer_fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{self.prefix}: was made with another tokenizer ({self.meta.tokenizer}, {self.meta.vocab_size} tokens) than "
                f"{tokenizer.path} ({tokenizer.vocab_size} tokens); name that tokenizer, or make the corpus again with this one"
            )

    def _read_byte_counts(self) -> np.ndarray:
        path = byte_counts_path(self.prefix)
        try:
            counts = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error}); make the corpus again") from error
        if counts.shape != (len(self.dataset),):
            raise UserError(
                f"{path}: has shape {counts.shape}, the corpus {len(self.dataset)} documents; make the corpus again"
            )
        return counts

    @property
    def eod_id(self) -> int | None:
        """Return the token at the end of each document: from the metadata, else the tokenizer's end of sequence, else None."""
        if self.meta:
            return self.meta.eod_id
        return self.tokenizer.eos_id if self.tokenizer else None

    def split(self, name: str, weights: str = DEFAULT_SPLIT) -> CorpusSplit:
        """Return the documents of split ``name`` (train, valid, test) under ``weights``, such as "949,50,1"."""
        ranges = split_ranges(weights, len(self.dataset))
        if name not in ranges:
            raise UserError(f"split '{name}' does not exist{nearest(name, SPLITS)}")
        part = CorpusSplit(self, name, ranges[name].start, ranges[name].stop)
        if not part.token_count:
            raise UserError(
                f"{self.prefix}: split {weights} of {len(self.dataset)} documents leaves no tokens for {name}; "
                "give it a larger weight or the corpus more documents"
            )
        return part


class CorpusSplit:
    """The consecutive documents first..last (exclusive) of a corpus.

    tokens: theirs, one-dimensional, in the dtype of the file. document_starts: int64 [documents + 1], positions in ``tokens``.
    """

    def __init__(self, corpus: Corpus, name: str, first: int, last: int) -> None:
        starts = corpus.dataset.document_starts
        self.corpus = corpus
        self.name = name
        self.documents = range(first, last)
        self.tokens = corpus.dataset.tokens[starts[first] : starts[last]]
        self.document_starts = starts[first : last + 1] - starts[first]

    @property
    def token_count(self) -> int:
        """Return the tokens of the split, including ends of documents."""
        return len(self.tokens)

    def __str__(self) -> str:
        return f"{self.corpus.prefix} ({self.name})"


class CorpusWriter(IndexedWriter):
    """Writes a corpus with its extra files; all appear when the block ends without an error, the index last, or none.

    Memory is 12 bytes per document. Raises UserError when documents shall end with a token the tokenizer does not have.
    """

    def __init__(self, prefix: Path | str, tokenizer: Tokenizer, *, append_eod: bool, source_fingerprint: str) -> None:
        super().__init__(prefix, smallest_dtype(tokenizer.vocab_size))
        self.tokenizer = tokenizer
        self.eod_id = end_of_documents(tokenizer) if append_eod else None
        self.source_fingerprint = source_fingerprint
        self._byte_counts = array("q")

    def __enter__(self) -> CorpusWriter:
        super().__enter__()
        self._meta_temporary = self._add_file(meta_path(self.prefix))
        self._byte_counts_temporary = self._add_file(byte_counts_path(self.prefix))
        return self

    def end_text(self, byte_count: int) -> None:
        """End the document being written, a text of ``byte_count`` bytes, with the end-of-document token if there is one."""
        if self.eod_id is not None:
            self.append([self.eod_id])
        self.end_document()
        self._byte_counts.append(byte_count)

    def meta(self) -> CorpusMeta:
        """Return the metadata of the documents written so far."""
        return CorpusMeta(
            tokenizer=self.tokenizer.path.name,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            eod_id=self.eod_id,
            documents=len(self),
            tokens=self.token_count,
            bytes=sum(self._byte_counts),
            source_fingerprint=self.source_fingerprint,
        )

    def _complete_files(self) -> None:
        super()._complete_files()
        self._meta_temporary.write_text(json.dumps(dataclasses.asdict(self.meta()), indent=1) + "\n", encoding="utf-8")
        with open(self._byte_counts_temporary, "wb") as file:
            np.save(file, np.frombuffer(self._byte_counts, dtype=np.int64))


def end_of_documents(tokenizer: Tokenizer) -> int:
    """Return the token that ends documents; UserError where the tokenizer has none."""
    if tokenizer.eos_id is None:
        raise UserError(f"{tokenizer.path}: has no end-of-sequence token to end documents with; use --no-append-eod")
    return tokenizer.eos_id


def read_meta(prefix: Path | str) -> CorpusMeta | None:
    """Read ``PREFIX.meta.json``; return None without the file, raise UserError for invalid content."""
    path = meta_path(prefix)
    if not path.is_file():
        return None
    try:
        return CorpusMeta(**read_json(path))
    except (OSError, TypeError) as error:
        raise UserError(
            f"{path}: not a description of a corpus ({error}); delete it or make the corpus again"
        ) from error


def split_ranges(weights: str, documents: int) -> dict[str, range]:
    """Divide ``documents`` into consecutive ranges in proportion to ``weights``, rounded as Megatron does.

    Source: Megatron-LM, ``megatron/core/datasets/blended_megatron_dataset_config.py`` (parse and normalise the split) and
    ``blended_megatron_dataset_builder.py`` (round each boundary). Raises UserError unless there are up to three
    non-negative numbers, one of them positive; missing ones are zero.
    """
    try:
        values = [float(weight) for weight in str(weights).split(",")]
    except ValueError:
        values = []
    if not 0 < len(values) <= len(SPLITS) or min(values) < 0 or not 0 < sum(values) < float("inf"):
        raise UserError(f"split '{weights}': write weights of {', '.join(SPLITS)}, such as {DEFAULT_SPLIT}")
    total = sum(values)
    ends = [round(end * documents) for end in accumulate(value / total for value in values)]
    ends += [ends[-1]] * (len(SPLITS) - len(values))
    return {name: range(first, last) for name, first, last in zip(SPLITS, [0, *ends], ends, strict=False)}


CHUNK = 1 << 22  # tokens counted at a time


def byte_count(split: CorpusSplit, tokens: int | None = None) -> float | None:
    """Return the bytes (UTF-8) of the text of ``split``, or of its first ``tokens`` tokens.

    A partial document counts in proportion. The sizes were recorded with the corpus. Without them, decoded tokens without ends of
    documents are counted, which is exact for byte-level tokenizers. None without a tokenizer.
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
    """Return the bytes of text per token of all ``splits``, or of the first ``tokens`` of each; None if they are unknown.

    Ends of documents are tokens without bytes.
    """
    counts = [split.token_count for split in splits] if tokens is None else tokens
    totals = [byte_count(split, count) for split, count in zip(splits, counts, strict=True)]
    sizes = [total for total in totals if total is not None]
    return sum(sizes) / sum(counts) if len(sizes) == len(totals) else None


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Convert a loss in nats per token to bits per byte of text, which does not depend on the tokenizer."""
    return nats_per_token / (math.log(2) * bytes_per_token)


def unigram_loss(train: Sequence[CorpusSplit], held_out: Sequence[CorpusSplit], vocab_size: int) -> float:
    """Return the nats per token of ``held_out`` under the token frequencies of ``train``, one added to each count."""
    counts = _token_counts(train, vocab_size) + 1
    log_probabilities = np.log(counts) - math.log(counts.sum())
    held_out_counts = _token_counts(held_out, vocab_size)
    return float(-(held_out_counts @ log_probabilities) / held_out_counts.sum())


def _token_counts(splits: Sequence[CorpusSplit], vocab_size: int) -> np.ndarray:
    """Return int64 [vocab_size] occurrences of each token."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for split in splits:
        for start in range(0, split.token_count, CHUNK):
            chunk_counts = np.bincount(split.tokens[start : start + CHUNK], minlength=vocab_size)
            if len(chunk_counts) > vocab_size:
                raise UserError(f"{split}: holds token {len(chunk_counts) - 1}, but vocab_size is {vocab_size}")
            counts += chunk_counts
    return counts
