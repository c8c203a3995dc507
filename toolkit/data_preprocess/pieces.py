"""Files cut into pieces of limited size, so that memory is bounded and one large file keeps all workers busy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mindllm.errors import UserError
from toolkit.data_preprocess.sources import Source

PIECE_BYTES = 1 << 18
# Between two lines of plain characters: there, the tokenizers we know cut the text themselves, so a piece changes no token.
SEAM = re.compile(rb"[!-~]\n(?=[!-~])")


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a file; ``last`` where the document ends with it."""

    path: str
    start: int
    stop: int
    last: bool

    @property
    def size(self) -> int:
        """Bytes of the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class Text:
    """The text of a piece; ``is_valid`` is False where bytes that are no UTF-8 were replaced by U+FFFD."""

    text: str
    byte_count: int
    is_valid: bool


def cut(sources: Iterable[Source], cuttable: bool = True) -> Iterator[Piece]:
    """Yields the pieces of all ``sources`` in order, about PIECE_BYTES each; whole files unless ``cuttable``."""
    for source in sources:
        start = 0
        while cuttable and source.size - start > 2 * PIECE_BYTES:
            stop = _find_cut(source, start + PIECE_BYTES)
            yield Piece(source.path, start, stop, last=False)
            start = stop
        yield Piece(source.path, start, source.size, last=True)


def batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yields lists of consecutive pieces that together hold at least PIECE_BYTES: the unit of work."""
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if sum(piece.size for piece in batch) >= PIECE_BYTES or len(batch) == 256:
            yield batch
            batch = []
    if batch:
        yield batch


def read(piece: Piece) -> Text:
    """Reads the text of ``piece``; raises UserError when the file cannot be read or has become shorter."""
    try:
        with open(piece.path, "rb") as file:
            file.seek(piece.start)
            content = file.read(piece.size)
    except OSError as error:
        raise UserError(f"{piece.path}: cannot be read ({error.strerror})") from error
    if len(content) != piece.size:
        raise UserError(f"{piece.path}: changed while it was read; start again")
    try:
        return Text(content.decode("utf-8"), len(content), is_valid=True)
    except UnicodeDecodeError:
        text = content.decode("utf-8", errors="replace")
        return Text(text, len(text.encode("utf-8")), is_valid=False)


def _find_cut(source: Source, near: int) -> int:
    """Returns the first good place to cut in the PIECE_BYTES after ``near``: a seam, else a line's end, else a character's."""
    try:
        with open(source.path, "rb") as file:
            file.seek(near)
            content = file.read(PIECE_BYTES)
    except OSError as error:
        raise UserError(f"{source.path}: cannot be read ({error.strerror})") from error
    if (seam := SEAM.search(content)) is not None:
        return near + seam.end()
    if (line := content.find(b"\n")) >= 0:
        return near + line + 1
    return near + next((index for index, byte in enumerate(content[:4]) if byte & 0xC0 != 0x80), 0)
