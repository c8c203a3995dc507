"""Token files in Megatron's indexed format: ``PREFIX.bin`` has tokens, ``PREFIX.idx`` the start of each document.

The layout is that of Megatron-LM (``megatron/core/datasets/indexed_dataset.py``): corpora are exchangeable without conversion.
"""

from __future__ import annotations

import struct
from array import array
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from mindllm.errors import UserError
from mindllm.files import atomic_path, naming, unexpanded
from mindllm.outside import open_file, read_bytes

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequence count, document index count
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LARGEST_INDEX = 1 << 33  # bytes; 400 million documents
LONGEST_DOCUMENT = np.iinfo(np.int32).max


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 when ``vocab_size`` tokens fit by Megatron's rule (below 65500), else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def bin_path(prefix: Path | str) -> Path:
    """Return the path of the tokens of ``prefix``."""
    return Path(f"{prefix}.bin")


def index_path(prefix: Path | str) -> Path:
    """Return the path of the index of ``prefix``."""
    return Path(f"{prefix}.idx")


class IndexedWriter:
    """Writes documents one after another; every document is one sequence.

    A context manager: both files appear at the end of the block, the index last, so an index always has all of its tokens. On an
    error both are removed. Memory is 4 bytes per document.
    """

    def __init__(self, prefix: Path | str, dtype: np.dtype) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.token_count = 0
        self._lengths = array("i")
        self._open_length = 0
        self._files = ExitStack()
        self._paths: list[Path] = []
        self._bin: BinaryIO

    def __enter__(self) -> IndexedWriter:
        self._index_temporary = self._add_file(index_path(self.prefix))  # first in, so the last to appear
        self._files.enter_context(naming(bin_path(self.prefix)))
        self._bin = self._open_tokens()
        return self

    def _open_tokens(self) -> BinaryIO:
        """Open the file that becomes ``PREFIX.bin`` with the others. A resumable writer opens existing work instead."""
        return self._files.enter_context(open(self._add_file(bin_path(self.prefix)), "wb", buffering=1 << 20))

    def _add_file(self, path: Path) -> Path:
        """Return the temporary path of a file that appears with the others."""
        temporary = self._files.enter_context(atomic_path(path))
        self._paths.append(path)
        return temporary

    def append(self, tokens: ArrayLike) -> None:
        """Add ``tokens`` (one-dimensional integers) to the document being written.

        Raises ValueError when a token does not fit the dtype of the file.
        """
        values = np.asarray(tokens)
        if not values.size:
            return
        limits = np.iinfo(self.dtype)
        if values.min() < limits.min or values.max() > limits.max:
            raise ValueError(
                f"tokens {values.min()}..{values.max()} do not fit {self.dtype} in {bin_path(self.prefix)}"
            )
        with naming(bin_path(self.prefix)):
            self._bin.write(values.astype(self.dtype, copy=False).tobytes())
        self._open_length += values.size

    def end_document(self) -> None:
        """End the document being written; a document without tokens counts."""
        if self._open_length > LONGEST_DOCUMENT:
            raise UserError(
                f"document {len(self._lengths)} has {self._open_length} tokens; at most {LONGEST_DOCUMENT} fit"
            )
        self._lengths.append(self._open_length)
        self.token_count += self._open_length
        self._open_length = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if kind is not None:
            return self._files.__exit__(kind, error, trace)
        self._publish()
        return None

    def _publish(self) -> None:
        replacing = False
        try:
            with self._files:
                self._complete_files()
                replacing = True
                index_path(self.prefix).unlink(missing_ok=True)  # never an old index over new tokens
        except BaseException:
            if replacing:
                for path in self._paths:
                    path.unlink(missing_ok=True)
            raise

    def _complete_files(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        header = HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(documents))
        with open(self._index_temporary, "wb") as file:
            for part in (header, lengths.astype("<i4").tobytes(), pointers.tobytes(), documents.tobytes()):
                file.write(part)


class IndexedDataset:
    """The documents of ``PREFIX.bin`` and ``PREFIX.idx``, mapped into memory; ``dataset[i]`` is document i as a view.

    tokens: all tokens, one-dimensional, of the file's dtype. document_starts: int64 [documents + 1], positions in ``tokens``.
    Memory is 8 bytes per document (about 20 per sequence while it opens). Raises UserError for a file that is missing,
    truncated, of another format, or whose index does not belong to its tokens.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        for path in (index_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise UserError(f"{path}: no such file{unexpanded(prefix) or _prefix_hint(prefix)}")
        self.dtype, self.document_starts = _read_index(index_path(prefix))
        path = bin_path(self.prefix)
        size, expected = path.stat().st_size, self.token_count * self.dtype.itemsize
        if size != expected:
            raise UserError(
                f"{path}: has {size} bytes but its index {index_path(self.prefix).name} describes {expected}; "
                "the file is truncated or belongs to another index: make both again"
            )
        self.tokens = np.memmap(path, dtype=self.dtype, mode="r") if size else np.empty(0, dtype=self.dtype)

    @property
    def token_count(self) -> int:
        """Return the tokens of all documents."""
        return int(self.document_starts[-1])

    def __len__(self) -> int:
        return len(self.document_starts) - 1

    def __getitem__(self, document: int) -> np.ndarray:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        return self.tokens[self.document_starts[document] : self.document_starts[document + 1]]


def _prefix_hint(prefix: Path | str) -> str:
    if str(prefix).endswith((".bin", ".idx")):
        return f"; write the prefix without its ending: {str(prefix)[:-4]}"
    return f"; make it with mindllm data TEXT --output-prefix {prefix}, or name another by --train_dataset_dir PREFIX"


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray]:
    """Return (dtype of the tokens, int64 [documents + 1] start of each document in tokens)."""
    with open_file(path) as file:
        header, size = file.read(HEADER.size), path.stat().st_size
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(f"{path}: not an index of Megatron's format (it does not begin with MMIDIDX)")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise UserError(
            f"{path}: version {version}, dtype code {code}; readable are version {VERSION}, codes {sorted(DTYPES)}"
        )
    dtype = DTYPES[code]
    if dtype.kind == "f":
        raise UserError(f"{path}: holds {dtype.name} values, not tokens")
    expected = HEADER.size + sequences * (4 + 8) + documents * 8
    if size != expected:
        raise UserError(
            f"{path}: has {size} bytes, its header describes {expected}; truncated, or not of text: make it again"
        )
    content = read_bytes(path, LARGEST_INDEX)
    lengths = np.frombuffer(content, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(content, "<i8", sequences, HEADER.size + sequences * 4)
    boundaries = np.frombuffer(content, "<i8", documents, HEADER.size + sequences * 12)
    starts = np.zeros(sequences + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    if (lengths < 0).any() or not np.array_equal(starts[:-1] * dtype.itemsize, pointers):
        raise UserError(
            f"{path}: its sequences do not follow one another without gaps; the file is damaged: make it again"
        )
    if not _are_boundaries(boundaries, sequences):
        raise UserError(
            f"{path}: its document indices do not run from 0 to {sequences} in order; the file is damaged: make it again"
        )
    return dtype, starts[boundaries]


def _are_boundaries(boundaries: np.ndarray, sequences: int) -> bool:
    if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != sequences:
        return False
    return bool((np.diff(boundaries) >= 0).all())
