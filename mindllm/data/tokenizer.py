"""Tokenizers from their files (``tokenizer.json``, sentencepiece ``tokenizer.model``) and training of a byte-level BPE.

Text is always encoded as plain text: the name of a special token inside a document is spelled out, never turned into the token,
so no document can end another. The libraries are imported when a tokenizer is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindllm.errors import UserError
from mindllm.files import atomic_path

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as FastTokenizer

END_OF_TEXT = "<|endoftext|>"
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # looked for where no tokenizer_config.json names them
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")
FILE_NAMES = ("tokenizer.json", "tokenizer.model")


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer.

    vocab_size is the largest id plus one. fingerprint is equal for two files that give the same ids to every text.
    special_tokens are those with a purpose by its name ("bos_token": "<s>"), special_names the names of all.
    """

    path: Path
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    fingerprint: str
    special_tokens: Mapping[str, str]
    special_names: Sequence[str]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text`` alone: nothing is put before or after it."""

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of ``text``, in which names of special tokens mean them, and each id's place in it (from, to)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``; special tokens appear by their names."""


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Loads ``tokenizer.json``, a sentencepiece ``.model``, or the one of them in a directory.

    Raises UserError when the file is missing or is not a tokenizer.
    """
    file = _tokenizer_file(Path(path))
    return SentencePieceTokenizer(file) if file.suffix == ".model" else JsonTokenizer(file)


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        found = next((path / name for name in FILE_NAMES if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: the directory has no {' or '.join(FILE_NAMES)}")
        return found
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file (tokenizer.json or a sentencepiece .model)")
    if path.suffix not in (".json", ".model"):
        raise UserError(f"{path}: a tokenizer is a tokenizer.json or a sentencepiece .model")
    return path


class JsonTokenizer:
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``; special tokens are named by a tokenizer_config.json beside it."""

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
        named = _named_special_tokens(path.with_name("tokenizer_config.json"))
        self.eos_id = self._first_id([named["eos_token"]] if "eos_token" in named else EOS_NAMES)
        self.bos_id = self._first_id([named["bos_token"]] if "bos_token" in named else BOS_NAMES)
        parsed = json.loads(content)
        self.fingerprint = _fingerprint_of_json(parsed)
        self.special_names: Sequence[str] = [
            token["content"] for token in parsed.get("added_tokens") or [] if token["special"]
        ]
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        self.special_tokens: Mapping[str, str] = {
            key: str(self._tokenizer.id_to_token(id)) for key, id in ids.items() if id is not None
        }
        self._content = content

    def _first_id(self, names: Iterable[str]) -> int | None:
        return next((id for name in names if (id := self._tokenizer.token_to_id(name)) is not None), None)

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
        self.eos_id = _absent_is_none(self._processor.eos_id())
        self.bos_id = _absent_is_none(self._processor.bos_id())
        self.fingerprint = hashlib.sha256(content).hexdigest()
        pieces = [id for id in range(self.vocab_size) if self._processor.IsControl(id)]
        self.special_names: Sequence[str] = [self._processor.IdToPiece(id) for id in pieces]
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        self.special_tokens: Mapping[str, str] = {
            key: self._processor.IdToPiece(id) for key, id in ids.items() if id is not None
        }
        self._special = re.compile("(" + "|".join(map(re.escape, self.special_names)) + ")")

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
        """Returns the text of ``ids``; sentencepiece drops the space before the first word."""
        return self._processor.decode([int(id) for id in ids])


def is_cuttable(tokenizer: Tokenizer) -> bool:
    """Tells whether text may be encoded in pieces: not where the tokenizer puts something before every text."""
    return tokenizer.encode("x\ny") == tokenizer.encode("x\n") + tokenizer.encode("y")


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)
) -> FastTokenizer:
    """Trains a byte-level BPE (Radford et al. 2019): any text is representable, decoding gives the text back.

    The result depends on the texts and the sizes only, not on threads or the run. Special tokens have the first ids.
    Raises UserError when ``vocab_size`` is below the 256 bytes and special tokens, or the texts do not fill it.
    """
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(special_tokens)
    if vocab_size < smallest:
        raise UserError(
            f"a byte-level vocabulary has at least {smallest} tokens (256 bytes and special tokens), not {vocab_size}"
        )
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"the texts give only {tokenizer.get_vocab_size()} tokens where {vocab_size} were asked for: "
            "ask for at most that many, or give more text"
        )
    return tokenizer


def save_tokenizer(tokenizer: FastTokenizer, path: Path | str) -> None:
    """Writes a trained tokenizer as a ``tokenizer.json``, whole or not at all."""
    with atomic_path(path) as temporary:
        tokenizer.save(str(temporary))


def _named_special_tokens(path: Path) -> dict[str, str]:
    """Reads eos_token and bos_token of a Hugging Face tokenizer_config.json: a string, or an object with its ``content``."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    tokens = {key: content.get(key) for key in ("eos_token", "bos_token")}
    return {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items() if token}


def _fingerprint_of_json(content: dict[str, Any]) -> str:
    """Hashes what decides the ids of a text; padding, truncation, templates and how merges are spelled do not."""
    model = dict(content["model"])
    model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
    added = [(token["id"], token["content"], token["special"]) for token in content.get("added_tokens") or []]
    parts = [model, content.get("normalizer"), content.get("pre_tokenizer"), added]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _absent_is_none(id: int) -> int | None:
    return None if id < 0 else id
