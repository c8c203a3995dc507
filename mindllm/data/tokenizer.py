"""Tokenizers from their files (``tokenizer.json``, sentencepiece ``tokenizer.model``) and training of a byte-level BPE.

Text is always encoded as plain text: the name of a special token inside a document is spelled out, never turned into the token,
so no document can end another. The libraries are imported when a tokenizer is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindllm.config.dataset import TOKENIZER_FILES
from mindllm.data.special_tokens import SpecialTokens, read_special_tokens
from mindllm.errors import UserError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as FastTokenizer


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer.

    vocab_size is the largest id plus one. adds_bos: a text to be continued begins with bos_id. fingerprint is equal for two
    files that give the same ids to every text.
    special_tokens are those with a purpose by its name ("bos_token": "<s>"), special_names the names of all.
    """

    path: Path
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    adds_bos: bool
    fingerprint: str
    special_tokens: Mapping[str, str]
    special_names: Sequence[str]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text`` alone: nothing is put before or after it."""

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of ``text``, in which names of special tokens mean them, and each id's place in it (from, to)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``; special tokens appear by their names."""

    def token(self, id: int) -> str:
        """Returns the name of a token."""


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Loads ``tokenizer.json``, a sentencepiece ``.model``, or the one of them in a directory.

    Raises UserError when the file is missing or is not a tokenizer.
    """
    file = _tokenizer_file(Path(path))
    return SentencePieceTokenizer(file) if file.suffix == ".model" else JsonTokenizer(file)


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        found = next((path / name for name in TOKENIZER_FILES if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: the directory has no {' or '.join(TOKENIZER_FILES)}")
        return found
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file (tokenizer.json or a sentencepiece .model)")
    if path.suffix not in (".json", ".model"):
        raise UserError(f"{path}: a tokenizer is a tokenizer.json or a sentencepiece .model")
    return path


class JsonTokenizer:
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``; special tokens are named by the files beside it."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self.path = path
        try:
            content = path.read_text(encoding="utf-8")
            self._tokenizer: FastTokenizer = FastTokenizer.from_str(content)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{path}: not a tokenizer.json ({error})") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        special = read_special_tokens(path.parent)
        self.eos_id = special.id_of("eos", self._tokenizer.token_to_id, self.vocab_size)
        self.bos_id = special.id_of("bos", self._tokenizer.token_to_id, self.vocab_size)
        self.pad_id = special.id_of("pad", self._tokenizer.token_to_id, self.vocab_size)
        self.adds_bos = self._template_adds_bos() if special.adds_bos is None else special.adds_bos
        parsed = json.loads(content)
        self.fingerprint = _fingerprint_of_json(parsed)
        self.special_names: Sequence[str] = [
            token["content"] for token in parsed.get("added_tokens") or [] if token["special"]
        ]
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        self.special_tokens: Mapping[str, str] = {
            key: str(self._tokenizer.id_to_token(id)) for key, id in ids.items() if id is not None
        }
        self._content = content

    def _template_adds_bos(self) -> bool:
        """Whether the file's own template puts the token that begins a text before one."""
        return self.bos_id is not None and self._tokenizer.encode("a").ids[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text`` alone."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of ``text`` with its special tokens, and their places."""
        encoding = self._with_special_tokens.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _with_special_tokens(self) -> FastTokenizer:
        """The same tokenizer, which takes names for the tokens; without a post-processor, as those shift places."""
        from tokenizers import Tokenizer as FastTokenizer

        plain = {**json.loads(self._content), "post_processor": None, "truncation": None, "padding": None}
        return FastTokenizer.from_str(json.dumps(plain))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token(self, id: int) -> str:
        """Returns the name of a token."""
        return self._tokenizer.id_to_token(id) or ""


class SentencePieceTokenizer:
    """A sentencepiece model, such as the ``tokenizer.model`` of Llama 1 and 2."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self.path = path
        content = path.read_bytes()
        self._processor: SentencePieceProcessor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
            self.vocab_size = self._processor.vocab_size()
        except Exception as error:  # the library raises RuntimeError and others, by version
            raise UserError(f"{path}: not a sentencepiece model ({error})") from error
        if not self.vocab_size:
            raise UserError(f"{path}: not a sentencepiece model (it has no tokens)")
        special = read_special_tokens(path.parent)
        self.eos_id = self._id(self._processor.eos_id(), "eos", special)
        self.bos_id = self._id(self._processor.bos_id(), "bos", special)
        self.pad_id = self._id(self._processor.pad_id(), "pad", special)
        self.adds_bos = self.bos_id is not None and special.adds_bos is not False
        self.fingerprint = hashlib.sha256(content).hexdigest()
        pieces = [id for id in range(self.vocab_size) if self._processor.IsControl(id)]
        self.special_names: Sequence[str] = [self._processor.IdToPiece(id) for id in pieces]
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        self.special_tokens: Mapping[str, str] = {
            key: self._processor.IdToPiece(id) for key, id in ids.items() if id is not None
        }
        self._special = re.compile("(" + "|".join(map(re.escape, self.special_names)) + ")")

    def _id(self, own: int, role: str, special: SpecialTokens) -> int | None:
        """The token of ``role``; ``own`` is -1 where the model has none."""
        return special.id_of(role, self._piece_id, self.vocab_size, own if own >= 0 else None)

    def _piece_id(self, name: str) -> int | None:
        id = self._processor.piece_to_id(name)
        return id if self._processor.id_to_piece(id) == name else None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text`` alone."""
        return self._processor.encode(text, out_type=int, add_bos=False, add_eos=False)

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of ``text`` with its special tokens, and their places; what is between them is encoded by itself."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        start = 0
        for part in self._special.split(text) if self.special_names else [text]:
            if part in self.special_names:
                ids.append(self._processor.PieceToId(part))
                places.append((start, start + len(part)))
            elif part:
                found = self._processor.encode(part, out_type="offset_mapping", add_bos=False, add_eos=False)
                ids += found["ids"]
                places += [(start + first, start + last) for first, last in found["offsets"]]
            start += len(part)
        return ids, places

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``; sentencepiece drops the space before the first word.

        Ids beyond the vocabulary, which rows that pad a model's embedding have, have no text.
        """
        return self._processor.decode([int(id) for id in ids if id < self.vocab_size])

    def token(self, id: int) -> str:
        """Returns the name of a token."""
        return self._processor.id_to_piece(id)


def is_cuttable(tokenizer: Tokenizer) -> bool:
    """Tells whether text may be encoded in pieces: not where the tokenizer puts something before every text."""
    return tokenizer.encode("x\ny") == tokenizer.encode("x\n") + tokenizer.encode("y")


def _fingerprint_of_json(content: dict[str, Any]) -> str:
    """Hashes what decides the ids of a text; padding, truncation, templates and how merges are spelled do not."""
    model = dict(content["model"])
    model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
    added = [(token["id"], token["content"], token["special"]) for token in content.get("added_tokens") or []]
    parts = [model, content.get("normalizer"), content.get("pre_tokenizer"), added]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
