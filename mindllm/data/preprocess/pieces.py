"""Files split into pieces of limited size, so that memory is bounded and one large file keeps all workers busy.

Workers read plain text files. Files that must be read from the beginning (compressed ones, records) are read by this process, and
their pieces carry the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mindllm.data.preprocess.sources import DocumentReader, Source
from mindllm.data.records import compression_suffix, kind_of, open_bytes, read_records, reading
from mindllm.errors import UserError

PIECE_BYTES = 1 << 18
UNSPLIT_BYTES = 32 << 20  # of a document that must be encoded in one piece
# Between two lines of plain characters: there, the tokenizers we know cut the text themselves, so a piece changes no token.
SEAM = re.compile(rb"[!-~]\n(?=[!-~])")


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a file; ``last`` where the document ends with it.

    Of a file that is read in order, ``content`` is the text and the bytes of the file are those of its last piece.
    """

    path: str
    start: int
    stop: int
    last: bool
    content: bytes | None = None

    @property
    def size(self) -> int:
        """Return the bytes of the file in the piece."""
        return self.stop - self.start

    @property
    def work(self) -> int:
        """Return the bytes to encode."""
        return self.size if self.content is None else len(self.content)


@dataclass(frozen=True)
class Text:
    """The text of a piece; ``is_valid`` is False if invalid UTF-8 was replaced by U+FFFD."""

    text: str
    byte_count: int
    is_valid: bool


def cut(sources: Iterable[Source], cuttable: bool = True, documents: DocumentReader | None = None) -> Iterator[Piece]:
    """Yield the pieces of all ``sources`` in order, about PIECE_BYTES each; whole documents unless ``cuttable``.

    A file is a document; with ``documents``, every record is one in files that hold records.
    """
    for source in sources:
        if documents is not None and kind_of(source.path):
            yield from _marked_with_size(_records(source, documents, cuttable), source)
        elif compression_suffix(source.path):
            yield from _marked_with_size(_cut_stream(source, cuttable), source)
        else:
            start = 0
            if not cuttable:
                _check_unsplit_size(source.size, source.path)
            while cuttable and source.size - start > 2 * PIECE_BYTES:
                stop = start + PIECE_BYTES + _find_cut(_bytes(source.path, start + PIECE_BYTES, PIECE_BYTES))
                yield Piece(source.path, start, stop, last=False)
                start = stop
            yield Piece(source.path, start, source.size, last=True)


def _cut_stream(source: Source, cuttable: bool) -> Iterator[Piece]:
    """Split a compressed file exactly as the uncompressed file would be split."""
    with reading(source.path), open_bytes(source.path) as file:
        content = b""
        while block := file.read(PIECE_BYTES if cuttable else UNSPLIT_BYTES + 1):
            content += block
            if not cuttable:
                _check_unsplit_size(len(content), source.path)
            while cuttable and len(content) > 2 * PIECE_BYTES:
                stop = PIECE_BYTES + _find_cut(content[PIECE_BYTES : 2 * PIECE_BYTES])
                yield Piece(source.path, 0, 0, last=False, content=content[:stop])
                content = content[stop:]
        yield Piece(source.path, 0, 0, last=True, content=content)


def _records(source: Source, documents: DocumentReader, cuttable: bool) -> Iterator[Piece]:
    for number, record in enumerate(read_records(source.path, documents.columns), start=1):
        place = f"{source.path}: record {number}"
        content = documents.text(record, place).encode("utf-8", errors="surrogatepass")
        if not cuttable:
            _check_unsplit_size(len(content), place)
        # cuts the text of a record where a file with this text would be cut
        start = 0
        while cuttable and len(content) - start > 2 * PIECE_BYTES:
            stop = start + PIECE_BYTES + _find_cut(content[start + PIECE_BYTES : start + 2 * PIECE_BYTES])
            yield Piece(source.path, 0, 0, last=False, content=content[start:stop])
            start = stop
        yield Piece(source.path, 0, 0, last=True, content=content[start:])


def _check_unsplit_size(size: int, place: str) -> None:
    """Refuse a document that may exceed the memory: a tokenizer takes over a hundred bytes per byte of one text."""
    if size > UNSPLIT_BYTES:
        raise UserError(
            f"{place}: is a document of more than {UNSPLIT_BYTES >> 20} MB, which this tokenizer can only encode as a whole; "
            "divide it into several documents"
        )


def _marked_with_size(pieces: Iterator[Piece], source: Source) -> Iterator[Piece]:
    previous = next(pieces, None)
    for piece in pieces:
        assert previous is not None
        yield previous
        previous = piece
    if previous is not None:
        yield replace(previous, stop=source.size)


def batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of consecutive pieces that together hold at least PIECE_BYTES: the unit of work."""
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if sum(piece.work for piece in batch) >= PIECE_BYTES or len(batch) == 256:
            yield batch
            batch = []
    if batch:
        yield batch


def read(piece: Piece) -> Text:
    """Read the text of ``piece``; raises UserError when the file cannot be read or has become shorter."""
    content = _bytes(piece.path, piece.start, piece.size) if piece.content is None else piece.content
    if len(content) != piece.work:
        raise UserError(f"{piece.path}: changed while it was read; start again")
    try:
        return Text(content.decode("utf-8"), len(content), is_valid=True)
    except UnicodeDecodeError:
        text = content.decode("utf-8", errors="replace")
        return Text(text, len(text.encode("utf-8")), is_valid=False)


def _bytes(path: str, start: int, count: int) -> bytes:
    """Read ``count`` bytes of a file from ``start`` on, fewer at its end."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(count)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _find_cut(content: bytes) -> int:
    """Return the first good place to cut ``content``: a seam, else a line's end, else a character's."""
    if (seam := SEAM.search(content)) is not None:
        return seam.end()
    if (line := content.find(b"\n")) >= 0:
        return line + 1
    return next((index for index, byte in enumerate(content[:4]) if byte & 0xC0 != 0x80), 0)
