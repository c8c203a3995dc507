"""Making a corpus: the tokenizer if it is missing, then the indexed files, unless they are up to date."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from mindllm.data.corpus import Corpus, CorpusMeta, corpus_files, end_of_documents, read_meta
from mindllm.data.indexed import index_path
from mindllm.data.preprocess.pieces import PIECE_BYTES, Piece, cut, read
from mindllm.data.preprocess.resume import ResumableWriter, encode_pieces
from mindllm.data.preprocess.sources import DocumentReader, Source, fingerprint
from mindllm.data.records import compression_suffix
from mindllm.data.tokenizers.sentencepiece_tokenizer import TRAINED_KINDS, train_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer, is_cuttable, load_tokenizer
from mindllm.errors import UserError
from mindllm.terminal.progress import Progress, unwatched

PIECES_WORTH_A_WORKER = 8  # starting a process takes as long as encoding a few


@dataclass(frozen=True)
class Summary:
    """What was made. ``invalid_utf8`` names files in which bytes were replaced, ``empty`` counts files and records left out.

    ``resumed_tokens``: how many were there already, from a run that was interrupted. ``spelled_out``: how often each name of a
    special token is in the text and was encoded as words; empty where the corpus was there.
    """

    meta: CorpusMeta
    files: list[Path]
    tokenizer: Path
    seconds: float
    up_to_date: bool
    empty: int
    invalid_utf8: tuple[str, ...] = ()
    resumed_tokens: int = 0
    spelled_out: Mapping[str, int] = field(default_factory=dict)


def build(
    sources: Sequence[Source],
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    documents: DocumentReader | None = None,
    append_eod: bool = True,
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress = unwatched,
) -> Summary:
    """Write ``sources`` in their order as a corpus named ``prefix``: one document per file, or per record (``documents``).

    Does nothing when the corpus was made from the same sources and options. Raises UserError when it was made from others
    and ``overwrite`` is False.
    """
    began = time.perf_counter()
    digest = fingerprint(
        sources, tokenizer=tokenizer.fingerprint, append_eod=append_eod, **_options(documents, tokenizer)
    )
    texts = [source for source in sources if source.size]
    if not texts:
        raise UserError(f"all {len(sources)} files are empty")
    up_to_date = not overwrite and _is_up_to_date(prefix, digest)
    empty = len(sources) - len(texts)
    if up_to_date:
        meta = Corpus(prefix).meta
        assert meta is not None
        return Summary(meta, corpus_files(prefix), tokenizer.path, time.perf_counter() - began, up_to_date, empty)
    workers = _workers(texts, workers)
    with ResumableWriter(prefix, tokenizer, append_eod=append_eod, source_fingerprint=digest) as writer:
        resumed = writer.token_count
        _write(texts, writer, workers, documents, progress)
        if not len(writer):
            raise UserError(f"all documents of {len(texts)} files are empty")
    seconds = time.perf_counter() - began
    invalid = tuple(sorted(writer.invalid))
    return Summary(
        writer.meta(),
        corpus_files(prefix),
        tokenizer.path,
        seconds,
        up_to_date,
        empty + writer.empty,
        invalid,
        resumed,
        writer.spelled_out,
    )


def measure(
    sources: Sequence[Source],
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    documents: DocumentReader | None = None,
    workers: int = 1,
    progress: Progress = unwatched,
) -> Summary:
    """Return the summary that :func:`build` would give, without writing: of the existing corpus, or by encoding all text.

    Raises:
        UserError: there is no text, or a record without text; as in :func:`build`.
    """
    began = time.perf_counter()
    texts = [source for source in sources if source.size]
    if not texts:
        raise UserError(f"all {len(sources)} files are empty")
    existing = read_meta(prefix) if is_up_to_date(sources, prefix, tokenizer, documents) else None
    empty = len(sources) - len(texts)
    if existing is not None:
        return Summary(existing, corpus_files(prefix), tokenizer.path, time.perf_counter() - began, True, empty)
    counter = CountingWriter(tokenizer)
    _write(texts, counter, _workers(texts, workers), documents, progress)
    if not len(counter):
        raise UserError(f"all documents of {len(texts)} files are empty")
    digest = fingerprint(sources, tokenizer=tokenizer.fingerprint, append_eod=True, **_options(documents, tokenizer))
    seconds = time.perf_counter() - began
    return Summary(
        counter.meta(digest),
        [],
        tokenizer.path,
        seconds,
        False,
        empty + counter.empty,
        tuple(sorted(counter.invalid)),
        spelled_out=counter.spelled_out,
    )


def is_up_to_date(
    sources: Sequence[Source],
    prefix: Path,
    tokenizer: Tokenizer,
    documents: DocumentReader | None = None,
    append_eod: bool = True,
) -> bool:
    """Return whether ``prefix`` is the corpus that :func:`build` would make of these sources and options."""
    digest = fingerprint(
        sources, tokenizer=tokenizer.fingerprint, append_eod=append_eod, **_options(documents, tokenizer)
    )
    meta = read_meta(prefix) if index_path(prefix).exists() else None
    return meta is not None and meta.source_fingerprint == digest


def _options(documents: DocumentReader | None, tokenizer: Tokenizer) -> dict[str, object]:
    """Return what decides the tokens besides files and tokenizer: how records are read, and special tokens that are allowed."""
    allowed = sorted(tokenizer.allowed_special_tokens)
    options = {"documents": None if documents is None else asdict(documents), "allowed_special_tokens": allowed}
    return {key: value for key, value in options.items() if value}


def _workers(sources: Sequence[Source], most: int) -> int:
    # text is about four times as large as its compressed file
    work = sum(source.size * (4 if compression_suffix(source.path) else 1) for source in sources)
    return max(1, min(most, work // (PIECES_WORTH_A_WORKER * PIECE_BYTES)))


def prepare_tokenizer(
    path: Path,
    vocab_size: int | None,
    sources: Sequence[Source],
    documents: DocumentReader | None = None,
    progress: Progress = unwatched,
    at_most: bool = False,
) -> Tokenizer:
    """Load the tokenizer at ``path``; when it is missing and ``vocab_size`` is given, first trains it on ``sources``.

    ``at_most``: with fewer tokens where the texts give no more. Raises UserError when a tokenizer of another size is there.
    """
    if vocab_size is None or path.exists():
        tokenizer = load_tokenizer(path)
        if vocab_size not in (None, tokenizer.vocab_size):
            raise UserError(
                f"{path}: has {tokenizer.vocab_size} tokens, --train-tokenizer asks for {vocab_size}; "
                "delete the file, or name another with --tokenizer"
            )
        return tokenizer
    if path.suffix not in TRAINED_KINDS:
        raise UserError(f"{path}: a tokenizer is trained as {' or '.join(map(' '.join, TRAINED_KINDS.items()))}")
    pieces = cut((source for source in sources if source.size), documents=documents)
    train_tokenizer(_texts(pieces, _size(sources), progress), vocab_size, path, at_most)
    return load_tokenizer(path)


def _is_up_to_date(prefix: Path, digest: str) -> bool:
    if not index_path(prefix).exists():
        return False
    meta = read_meta(prefix)
    if meta is None or meta.source_fingerprint != digest:
        raise UserError(
            f"{index_path(prefix)}: exists, made from other files or options; use --overwrite or another prefix"
        )
    return True


def _write(
    sources: Sequence[Source],
    writer: ResumableWriter | CountingWriter,
    workers: int,
    documents: DocumentReader | None,
    progress: Progress,
) -> None:
    """Encode the pieces of ``sources`` that are not in ``writer`` yet."""
    pieces = cut(sources, is_cuttable(writer.tokenizer), documents)
    total = _size(sources)
    bytes_done = sum(piece.size for piece in islice(pieces, writer.pieces_done))
    progress("encoding", bytes_done, total)
    began, before = time.perf_counter(), writer.token_count
    for encoded in encode_pieces(pieces, writer.tokenizer, workers):
        writer.append(encoded.tokens)
        writer.open_bytes += encoded.byte_count
        if not encoded.is_valid:
            writer.invalid.add(encoded.piece.path)
        writer.spelled_out.update(encoded.spelled_out)
        if encoded.piece.last:
            writer.end_text(writer.open_bytes)
            writer.open_bytes = 0
        writer.end_piece()
        rate = (writer.token_count - before) / max(1e-3, time.perf_counter() - began)
        bytes_done += encoded.piece.size
        so_far = f"{len(writer):,} documents, {writer.token_count:,} tokens, {rate / 1e3:,.0f}k tokens/s"
        progress(f"encoding: {so_far}", bytes_done, total)


def _size(sources: Sequence[Source]) -> int:
    return sum(source.size for source in sources)


def _texts(pieces: Iterator[Piece], total: int, progress: Progress) -> Iterator[str]:
    bytes_done = 0
    for piece in pieces:
        yield read(piece).text
        bytes_done += piece.size
        progress("reading text for the tokenizer", bytes_done, total)
    progress("training the tokenizer", 0, 1)


class CountingWriter:
    """Counts the documents and tokens that ``ResumableWriter`` would write, without writing them.

    Each document ends with the tokenizer's end of document. ``pieces_done`` is 0. ``invalid``: paths of files with invalid UTF-8.
    ``empty``: documents without text.

    Raises:
        UserError: the tokenizer has no end of document.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eod_id = end_of_documents(tokenizer)
        self.tokenizer = tokenizer
        self.pieces_done = self.open_bytes = self.empty = 0
        self.token_count = 0
        self.invalid: set[str] = set()
        self.spelled_out: Counter[str] = Counter()
        self._documents = self._bytes = self._open_tokens = 0

    def __len__(self) -> int:
        return self._documents

    def append(self, tokens: Sized) -> None:
        """Count tokens of the document that is open."""
        self._open_tokens += len(tokens)

    def end_text(self, byte_count: int) -> None:
        """End a document of ``byte_count`` bytes; skip an empty one."""
        if byte_count:
            self._documents += 1
            self._bytes += byte_count
            self.token_count += self._open_tokens + 1
        else:
            self.empty += 1
        self._open_tokens = 0

    def end_piece(self) -> None:
        """Do nothing: pieces are not stored."""

    def meta(self, source_fingerprint: str) -> CorpusMeta:
        """Return the content of ``PREFIX.meta.json``."""
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
