"""What a corpus would hold, counted without being written: takes the place of the writer where a run is only looked at."""

from __future__ import annotations

from collections.abc import Sized

from mindllm.data.corpus import CorpusMeta, end_of_documents
from mindllm.data.tokenizers.tokenizer import Tokenizer


class CountingWriter:
    """Documents and tokens of what ``ResumableWriter`` would write; each document ends with the tokenizer's end.

    pieces_done: none, as nothing is there already. invalid: paths of files that are no UTF-8. empty: documents without text.

    Raises:
        UserError: the tokenizer has no end of documents.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eod_id = end_of_documents(tokenizer)
        self.tokenizer = tokenizer
        self.pieces_done = self.open_bytes = self.empty = 0
        self.token_count = 0
        self.invalid: set[str] = set()
        self._documents = self._bytes = self._open_tokens = 0

    def __len__(self) -> int:
        return self._documents

    def append(self, tokens: Sized) -> None:
        """Count tokens of the document that is open."""
        self._open_tokens += len(tokens)

    def end_text(self, byte_count: int) -> None:
        """End a document of so many bytes; one of none is left out."""
        if byte_count:
            self._documents += 1
            self._bytes += byte_count
            self.token_count += self._open_tokens + 1
        else:
            self.empty += 1
        self._open_tokens = 0

    def end_piece(self) -> None:
        """Nothing is kept of a piece."""

    def meta(self, source_fingerprint: str) -> CorpusMeta:
        """What ``PREFIX.meta.json`` would say."""
        tokenizer = self.tokenizer
        return CorpusMeta(
            tokenizer.path.name,
            tokenizer.fingerprint,
            tokenizer.vocab_size,
            self.eod_id,
            self._documents,
            self.token_count,
            self._bytes,
            source_fingerprint,
        )
