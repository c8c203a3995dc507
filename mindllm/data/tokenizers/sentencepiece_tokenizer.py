"""SentencePiece tokenizers, such as the ``tokenizer.model`` of Llama 1 and 2, and training of new tokenizers."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.data.tokenizers.special_tokens import KnownTokenizer, SpecialTokens, known_tokenizer, without_allowed
from mindllm.errors import UserError
from mindllm.outside import read_bytes

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mindllm.data.tokenizers.special_tokens import END_OF_TEXT
from mindllm.files import atomic_open, atomic_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


class SentencePieceTokenizer:
    """A SentencePiece model, such as the ``tokenizer.model`` of Llama 1 and 2, with tokens added by other files of its
    directory.
    """

    allowed_special_tokens: tuple[str, ...] = ()

    def __init__(self, path: Path, special: SpecialTokens) -> None:
        from sentencepiece import SentencePieceProcessor

        self.path = path
        content = read_bytes(path)
        self._processor: SentencePieceProcessor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
            self._own_size = self._processor.vocab_size()
        except Exception as error:  # the library raises RuntimeError and others, by version
            raise UserError(f"{path}: not a sentencepiece model ({error})") from error
        if not self._own_size:
            raise UserError(f"{path}: not a sentencepiece model (it has no tokens)")
        class_tokens = known_tokenizer(special.tokenizer_class, self._model_id)
        self._added = self._added_tokens(special, class_tokens)
        self._names = {id: name for name, id in self._added.items()}
        self.vocab_size = max(self._own_size, 1 + max(self._names, default=-1))
        self.eos_id = self._id(self._processor.eos_id(), "eos", special)
        self.bos_id = self._id(self._processor.bos_id(), "bos", special)
        self.pad_id = self._id(self._processor.pad_id(), "pad", special)
        adds = special.adds_bos if special.adds_bos is not None else not class_tokens.prefix
        self.adds_bos = self.bos_id is not None and adds
        prefix = class_tokens.prefix if not self.adds_bos else ()
        begin = [self.bos_id] if self.adds_bos else [self._piece_id(name) for name in prefix]
        self.prefix_ids = tuple(id for id in begin if id is not None)
        self.end_ids = tuple(id for name in class_tokens.ends if (id := self._piece_id(name)) is not None)
        self.fingerprint = hashlib.sha256(content + repr(sorted(self._added.items())).encode()).hexdigest()
        if not self._added:  # unchanged without added tokens, so that prepared data stays valid
            self.fingerprint = hashlib.sha256(content).hexdigest()
        regular = {token.name for token in special.added if not token.special}
        controls = [self._processor.IdToPiece(id) for id in range(self._own_size) if self._processor.IsControl(id)]
        marks = [name for name in (*class_tokens.marks, *special.more_names) if self._piece_id(name) is not None]
        added = [name for name in self._added if name not in regular]
        self.special_names: Sequence[str] = list(dict.fromkeys([*controls, *marks, *added]))
        ids = {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id}
        self.special_tokens: Mapping[str, Any] = special.template_variables(self.token, ids)
        self.chat_template = class_tokens.template
        self._spoken_names = regular
        self._spoken = _alternation(regular)
        self._marked = _alternation({*regular, *self.special_names})

    def _added_tokens(self, special: SpecialTokens, class_tokens: KnownTokenizer) -> dict[str, int]:
        """Return the tokens added by files and by the code of the tokenizer class.

        A file may rename an unused token of the model.
        """
        added = {token.name: token.id for token in special.added if self._model_id(token.name) != token.id}
        names = [name for name in class_tokens.appended if name not in added and self._model_id(name) is None]
        free = (id for id in count(self._own_size) if id not in set(added.values()))
        return added | dict(zip(names, free, strict=False))

    def _id(self, own: int, role: str, special: SpecialTokens) -> int | None:
        """Return the token of ``role``; ``own`` is -1 if the model has none."""
        return special.id_of(role, self._piece_id, self.vocab_size, own if own >= 0 else None)

    def _piece_id(self, name: str) -> int | None:
        return self._added.get(name, self._model_id(name))

    def _model_id(self, name: str) -> int | None:
        id = self._processor.piece_to_id(name)
        return id if self._processor.id_to_piece(id) == name else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` alone."""
        if self._spoken is None:
            return self._processor.encode(text, out_type=int, add_bos=False, add_eos=False)
        return self._encode(text, self._spoken)[0]

    def allowing(self, names: Sequence[str]) -> SentencePieceTokenizer:
        """Return this tokenizer, which takes ``names`` in a text for the special tokens that they are."""
        without_allowed(self, names)
        changed = copy.copy(self)
        changed._spoken = _alternation({*self._spoken_names, *names})
        changed.allowed_special_tokens = tuple(names)
        return changed

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``text`` with its special tokens, and their places; parts between them are encoded separately."""
        return self._encode(text, self._marked)

    def _encode(self, text: str, names: re.Pattern[str] | None) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        start = 0
        for index, part in enumerate(names.split(text) if names else [text]):
            if index % 2:  # a special token
                ids.append(self._required_id(part))
                places.append((start, start + len(part)))
            elif part:
                pieces = self._processor.encode(part, out_type="offset_mapping", add_bos=False, add_eos=False)
                ids += pieces["ids"]
                places += [(start + first, start + last) for first, last in pieces["offsets"]]
            start += len(part)
        return ids, places

    def _required_id(self, name: str) -> int:
        id = self._piece_id(name)
        assert id is not None, name
        return id

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; sentencepiece drops the space before the first word, and its own special tokens.

        Added tokens appear by their names. Ids beyond the vocabulary, which rows that pad a model's embedding have, have no text.
        """
        if not self._added:
            return self._processor.decode([int(id) for id in ids if id < self._own_size])
        texts: list[str] = []
        for is_added, group in groupby(map(int, ids), key=self._names.__contains__):
            part = list(group)
            texts.append(
                "".join(map(self._names.__getitem__, part))
                if is_added
                else self._processor.decode([id for id in part if id < self._own_size])
            )
        return "".join(texts)

    def token(self, id: int) -> str:
        """Return the name of a token."""
        return self._names[id] if id in self._names else self._processor.id_to_piece(id)


def _alternation(names: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds any of ``names``, the longest first; None without names."""
    if not names:
        return None
    return re.compile("(" + "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name)))) + ")")


TRAINED_KINDS = {".json": "(byte-level BPE)", ".model": "(sentencepiece)"}
LONGEST_LINE = 4000  # bytes; the library leaves out longer ones


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path, at_most: bool = False) -> None:
    """Train the kind of tokenizer of the suffix of ``path`` (:data:`TRAINED_KINDS`) and write it.

    ``at_most``: a byte-level BPE may have fewer tokens if the texts do not give more.
    """
    if path.suffix == ".json":
        save_tokenizer(train_byte_level_bpe(texts, vocab_size, at_most=at_most), path)
        return
    content = train_sentencepiece(texts, vocab_size)
    with atomic_open(path, "wb") as file:
        file.write(content)


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,), at_most: bool = False
) -> FastTokenizer:
    """Train a byte-level BPE (Radford et al. 2019): any text can be encoded, and decoding restores the text.

    The result depends on the texts and the sizes only, not on threads or the run. Special tokens have the first ids.
    Raises UserError if ``vocab_size`` is below the 256 bytes and special tokens, or, without ``at_most``, if the texts do not
    fill it.
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
    if tokenizer.get_vocab_size() < vocab_size and not at_most:
        raise UserError(
            f"the texts give only {tokenizer.get_vocab_size()} tokens where {vocab_size} were asked for: "
            "ask for at most that many, or give more text"
        )
    return tokenizer


def save_tokenizer(tokenizer: FastTokenizer, path: Path | str) -> None:
    """Write a trained tokenizer as a ``tokenizer.json``, whole or not at all."""
    with atomic_path(path) as temporary:
        tokenizer.save(str(temporary))


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a SentencePiece BPE (Kudo and Richardson 2018) like Llama's: byte fallback, single digits.

    Unlike Llama's it does not change a text: no space is added before it, none are merged. Tokens 0, 1, 2 are ``<unk>``, ``<s>``,
    ``</s>``. The result depends on the texts and the size only. Returns the bytes of the ``.model`` file.
    Raises UserError if the texts do not fill ``vocab_size``, or it is below the bytes and characters.
    """
    from sentencepiece import SentencePieceTrainer

    content = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=content,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.9995,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(f"cannot train {vocab_size} tokens on these texts: {_reason(error)}") from error
    return content.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines, long ones in parts, as sentences of the library. Line breaks are encoded as bytes, as in Llama."""
    for text in texts:
        for line in text.replace("\0", "").splitlines():
            for start in range(0, len(line), LONGEST_LINE // 4):
                yield line[start : start + LONGEST_LINE // 4]


def _reason(error: RuntimeError) -> str:
    """Return the error of SentencePiece without source location and command line options."""
    text = re.sub(r"^.*\] ", "", str(error)).strip()
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", text)
    if smallest:
        return f"the bytes and their characters are {smallest[1]} already, ask for at least that many"
    return text or "they are empty"
