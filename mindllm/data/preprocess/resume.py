"""Writing of a corpus that continues after a kill: finished work is in ``PREFIX.partial/`` and is not repeated.

Tokens, lengths and bytes are append-only files; ``progress.json`` has their valid sizes and the number of finished pieces. It is
replaced atomically after they are flushed. A continued run truncates the files to these sizes and skips the finished pieces.
Pieces are a function of inputs and options, so the result equals that of an uninterrupted run, byte for byte.

Several processes encode pieces in order, with a limited number in flight, and end cleanly on Ctrl-C.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from mindllm.data.corpus import CorpusWriter
from mindllm.data.indexed import bin_path, smallest_dtype
from mindllm.data.preprocess.pieces import Piece, batched, read
from mindllm.data.tokenizers.special_tokens import count_names, without_allowed
from mindllm.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from mindllm.errors import RunFailed, UserError
from mindllm.files import atomic_open, naming
from mindllm.outside import FileRefusedError, read_json

UNDER_WAY = 3  # batches per worker: enough that none waits
SAVE_BYTES = 4 << 20  # of tokens between two saves
LOGS = ("tokens", "lengths", "bytes")  # files of an unfinished corpus
Count = Annotated[int, Field(ge=0, strict=True)]


@dataclass(frozen=True)
class EncodedPiece:
    """The tokens of a piece, with the bytes of its text."""

    piece: Piece
    tokens: np.ndarray
    byte_count: int
    is_valid: bool
    spelled_out: Mapping[str, int]  # names of special tokens that stay words, and how often


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer, workers: int) -> Iterator[EncodedPiece]:
    """Yield every piece encoded, in the order of ``pieces``; the same for any number of workers. 1 worker: this process."""
    batches = batched(pieces)
    if workers == 1:
        for batch in batches:
            yield from _encode(batch, tokenizer)
        return
    resource_tracker.ensure_running()  # its start lifts the block of SIGINT that workers shall inherit
    executor = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.path, tokenizer.allowed_special_tokens),
    )
    try:
        for result in _in_order(executor, batches, UNDER_WAY * workers):
            yield from result
    except BrokenProcessPool as error:
        raise RunFailed("a worker process died, most likely for lack of memory: use fewer --workers") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _in_order(
    executor: ProcessPoolExecutor, batches: Iterator[list[Piece]], limit: int
) -> Iterator[list[EncodedPiece]]:
    pending: deque[Future[list[EncodedPiece]]] = deque()
    while True:
        while len(pending) < limit and (batch := next(batches, None)) is not None:
            with _without_interrupt():
                pending.append(executor.submit(_encode_in_worker, batch))
        if not pending:
            return
        yield pending.popleft().result()


@contextmanager
def _without_interrupt() -> Iterator[None]:
    """Block SIGINT. Processes started inside inherit that, so Ctrl-C reaches only the process that cleans up."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer_path: Path, allowed_special_tokens: Sequence[str]) -> None:
    global _worker_tokenizer
    threading.Thread(target=_follow_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(tokenizer_path, allowed_special_tokens)


def _follow_parent() -> None:
    """End this worker if its parent was killed; it would wait forever otherwise."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(batch: list[Piece]) -> list[EncodedPiece]:
    return _encode(batch, _worker_tokenizer)


def _encode(batch: list[Piece], tokenizer: Tokenizer) -> list[EncodedPiece]:
    dtype = smallest_dtype(tokenizer.vocab_size)
    names = without_allowed(tokenizer, tokenizer.allowed_special_tokens)
    encoded = []
    for piece in batch:
        text = read(piece)
        tokens = np.array(tokenizer.encode(text.text), dtype=dtype)
        spelled_out = count_names(text.text, names)
        encoded.append(EncodedPiece(piece, tokens, text.byte_count, text.is_valid, spelled_out))
    return encoded


@dataclass(frozen=True)
class SavedProgress:
    """State of an unfinished corpus: ``sizes`` in bytes of its files, all else as :class:`ResumableWriter` counts it."""

    source_fingerprint: str
    pieces: Count
    sizes: dict[str, Count]
    tokens: Count
    open_length: Count
    open_bytes: Count
    empty: Count
    invalid: tuple[str, ...]
    spelled_out: dict[str, Count] = field(default_factory=dict)


PROGRESS = TypeAdapter(SavedProgress)


class ResumableWriter(CorpusWriter):
    """A ``CorpusWriter`` that continues the work of one with the same ``source_fingerprint`` that was killed.

    pieces_done: pieces whose tokens exist when the block begins. invalid: paths of files with invalid UTF-8. spelled_out: names
    of special tokens in the text that are encoded as text, with their counts.

    Raises UserError if another process is making the same corpus.
    """

    def __init__(self, prefix: Path | str, tokenizer: Tokenizer, *, append_eod: bool, source_fingerprint: str) -> None:
        super().__init__(prefix, tokenizer, append_eod=append_eod, source_fingerprint=source_fingerprint)
        self.work = Path(f"{prefix}.partial")
        self.pieces_done = 0
        self.open_bytes = 0  # of text of the document being written
        self.empty = 0
        self.invalid: set[str] = set()
        self.spelled_out: Counter[str] = Counter()
        self._logged = 0
        self._saved_tokens = 0

    def __enter__(self) -> ResumableWriter:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)
        self._files.enter_context(self._locked())  # first in, so that the work goes when all else is there
        super().__enter__()
        return self

    def _open_tokens(self) -> BinaryIO:
        if not self._go_on():
            for name in LOGS:
                (self.work / name).write_bytes(b"")
        self._files.enter_context(self._published())
        self._paths.append(bin_path(self.prefix))
        for log, kind in ((self._lengths, "lengths"), (self._byte_counts, "bytes")):
            log.frombytes((self.work / kind).read_bytes())
        self._logged = len(self._lengths)
        return cast(BinaryIO, self._files.enter_context(open(self.work / "tokens", "ab", buffering=1 << 20)))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock this corpus against other processes; finally remove the work unless it can be continued."""
        with open(self.work / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{self.prefix}: another process is making this corpus; wait for it to end") from None
            try:
                yield
            except BaseException:
                if not (self.work / "progress.json").exists():
                    shutil.rmtree(self.work, ignore_errors=True)
                raise
            shutil.rmtree(self.work, ignore_errors=True)

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Rename the tokens on success."""
        yield
        with open(self.work / "tokens", "rb") as file:
            os.fsync(file.fileno())
        (self.work / "tokens").replace(bin_path(self.prefix))

    def _go_on(self) -> bool:
        """Continue existing work; return False if there is none, or it has other inputs or options."""
        try:
            progress = PROGRESS.validate_python(read_json(self.work / "progress.json"))
        except (FileNotFoundError, FileRefusedError, ValidationError):
            return False
        if progress.source_fingerprint != self.source_fingerprint:
            (self.work / "progress.json").unlink()
            return False
        if set(progress.sizes) != set(LOGS):
            return False
        sizes = {self.work / name: size for name, size in progress.sizes.items()}
        if any(not path.is_file() or path.stat().st_size < size for path, size in sizes.items()):
            return False
        for path, size in sizes.items():
            os.truncate(path, size)
        self.pieces_done, self.empty = progress.pieces, progress.empty
        self.open_bytes, self._open_length = progress.open_bytes, progress.open_length
        self.token_count = self._saved_tokens = progress.tokens
        self.invalid = set(progress.invalid)
        self.spelled_out = Counter(progress.spelled_out)
        return True

    def end_text(self, byte_count: int) -> None:
        """End a document of ``byte_count`` bytes like ``CorpusWriter.end_text``; count and skip an empty one."""
        if byte_count:
            super().end_text(byte_count)
        else:
            self.empty += 1

    def end_piece(self) -> None:
        """Count a piece as done, and save at intervals."""
        self.pieces_done += 1
        if (self.token_count + self._open_length - self._saved_tokens) * self.dtype.itemsize >= SAVE_BYTES:
            self._save()

    def _save(self) -> None:
        with naming(self.work):
            self._bin.flush()
            os.fsync(self._bin.fileno())
            _append(self.work / "lengths", self._lengths[self._logged :])
            _append(self.work / "bytes", self._byte_counts[self._logged :])
            self._logged, self._saved_tokens = len(self._lengths), self.token_count + self._open_length
            progress = SavedProgress(
                source_fingerprint=self.source_fingerprint,
                pieces=self.pieces_done,
                sizes={name: (self.work / name).stat().st_size for name in LOGS},
                tokens=self.token_count,
                open_length=self._open_length,
                open_bytes=self.open_bytes,
                empty=self.empty,
                invalid=tuple(sorted(self.invalid)),
                spelled_out=dict(self.spelled_out),
            )
            with atomic_open(self.work / "progress.json") as file:
                json.dump(asdict(progress), file)


def _append(path: Path, values: array) -> None:
    with open(path, "ab") as file:
        file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())
