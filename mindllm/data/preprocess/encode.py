"""Pieces of text to tokens on several processes: in order, with a limited number under way, ended cleanly by Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np

from mindllm.data.indexed import smallest_dtype
from mindllm.data.preprocess.pieces import Piece, batched, read
from mindllm.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from mindllm.errors import RunFailed

UNDER_WAY = 3  # batches per worker: enough that none waits


@dataclass(frozen=True)
class EncodedPiece:
    """The tokens of a piece, with the bytes of its text."""

    piece: Piece
    tokens: np.ndarray
    byte_count: int
    is_valid: bool


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer, workers: int) -> Iterator[EncodedPiece]:
    """Yields every piece encoded, in the order of ``pieces``; the same for any number of workers. 1 worker: this process."""
    batches = batched(pieces)
    if workers == 1:
        for batch in batches:
            yield from _encode(batch, tokenizer)
        return
    resource_tracker.ensure_running()  # its start lifts the block of SIGINT that workers shall inherit
    executor = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(tokenizer.path,)
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
    """Blocks SIGINT; processes started inside inherit that, so that Ctrl-C reaches only the one that has to clean up."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer_path: Path) -> None:
    global _worker_tokenizer
    threading.Thread(target=_follow_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(tokenizer_path)


def _follow_parent() -> None:
    """Ends this worker when its parent was killed, which would otherwise leave it waiting for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(batch: list[Piece]) -> list[EncodedPiece]:
    return _encode(batch, _worker_tokenizer)


def _encode(batch: list[Piece], tokenizer: Tokenizer) -> list[EncodedPiece]:
    dtype = smallest_dtype(tokenizer.vocab_size)
    encoded = []
    for piece in batch:
        text = read(piece)
        tokens = np.array(tokenizer.encode(text.text), dtype=dtype)
        encoded.append(EncodedPiece(piece, tokens, text.byte_count, text.is_valid))
    return encoded
