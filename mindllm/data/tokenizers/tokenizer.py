"""Tokenizers from the files that models ship: ``tokenizer.json``, sentencepiece, tiktoken's ranks, GPT-2's vocabulary and merges.

Text is always encoded as plain text: the name of a special token inside a document is spelled out, never turned into the token,
so no document can end another. The libraries are imported when a tokenizer is loaded.

The tokenizer of a run is checked against its model.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindllm.config import RunConfig
from mindllm.config.dataset import TOKENIZER_FILES
from mindllm.data.tokenizers.limits import LONGEST_TEXT, check_bounds
from mindllm.data.tokenizers.special_tokens import SpecialTokens, known_tokenizer, read_special_tokens, without_allowed
from mindllm.data.tokenizers.vocabularies import (
    gguf_chat_template,
    gguf_content,
    gguf_special_tokens,
    is_tiktoken,
    spelled,
    tiktoken_content,
    vocabulary_content,
)
from mindllm.errors import UserError, shortened
from mindllm.gguf import gguf_file
from mindllm.outside import parse_json, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

VOCABULARY = "vocab.json"
PANIC = "PanicException"  # of pyo3, which has no module to import it from
KINDS = "tokenizer.json, a sentencepiece .model, a .tiktoken file, vocab.json with merges.txt, or a GGUF file"


class Tokenizer(Protocol):
    """Interface of tokenizers.

    vocab_size is the largest id plus one. adds_bos: a text to continue begins with bos_id; prefix_ids: all ids it begins with.
    end_ids end an answer in addition to eos_id. chat_template is that of its class, or empty. fingerprint is equal for files that
    encode every text to the same ids. special_tokens are variables of chat templates by name ("bos_token": "<s>"), special_names
    the names of all special tokens. allowed_special_tokens: names in a text that are encoded as the token.
    """

    path: Path
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    adds_bos: bool
    prefix_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    chat_template: str
    special_tokens: Mapping[str, Any]
    special_names: Sequence[str]
    allowed_special_tokens: tuple[str, ...]

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` alone: nothing is put before or after it."""

    def allowing(self, names: Sequence[str]) -> Tokenizer:
        """Return this tokenizer, which takes ``names`` in a text for the special tokens that they are."""

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``text``, in which names of special tokens mean them, and each id's place in it (from, to)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; special tokens appear by their names."""

    def token(self, id: int) -> str:
        """Return the name of a token."""


def load_tokenizer(path: Path | str, allowed_special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Load the file of a tokenizer, that in a GGUF file, or the first of ``TOKENIZER_FILES`` in a directory.

    The names ``allowed_special_tokens`` in a text mean the tokens.

    Raises:
        UserError: the file is missing or is not a tokenizer, or a name is not that of a special token.
    """
    tokenizer = _load(path)
    return tokenizer.allowing(allowed_special_tokens) if allowed_special_tokens else tokenizer


def _load(path: Path | str) -> Tokenizer:
    if gguf := gguf_file(path):
        return JsonTokenizer(gguf, gguf_special_tokens(gguf), gguf_content(gguf), gguf_chat_template(gguf))
    file = _tokenizer_file(Path(path))
    special = read_special_tokens(file.parent)
    try:
        if file.suffix == ".tiktoken" or (file.suffix == ".model" and is_tiktoken(file)):
            return JsonTokenizer(file, special, tiktoken_content(file, special))
        if file.suffix == ".model":
            from mindllm.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

            return SentencePieceTokenizer(file, special)
        if file.name == VOCABULARY:
            return JsonTokenizer(file, special, vocabulary_content(file, special))
        return JsonTokenizer(file, special)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        file = next((path / name for name in TOKENIZER_FILES if (path / name).is_file()), None)
        if file is None:
            raise UserError(f"{path}: the directory has no {' or '.join(TOKENIZER_FILES)}")
        return file
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file ({KINDS})")
    if path.suffix not in (".json", ".model", ".tiktoken"):
        raise UserError(f"{path}: a tokenizer is a {KINDS}")
    return path


class JsonTokenizer:
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``, or ``content`` of one that was made of other files at ``path``."""

    allowed_special_tokens: tuple[str, ...] = ()

    def __init__(
        self, path: Path, special: SpecialTokens, content: dict[str, Any] | None = None, chat_template: str = ""
    ) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self.path = path
        self.is_made = content is not None
        with self._refusing("not a tokenizer.json", Exception):  # the library raises plain Exception
            self.content = read_text(path) if content is None else spelled(content)
            parsed = parse_json(self.content)
        self._growth = 1.0 if self.is_made else check_bounds(parsed, path)
        with self._refusing("not a tokenizer.json", Exception):
            self._tokenizer: FastTokenizer = FastTokenizer.from_str(self.content)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_id = special.id_of("eos", self._tokenizer.token_to_id, self.vocab_size)
        self.bos_id = special.id_of("bos", self._tokenizer.token_to_id, self.vocab_size)
        self.pad_id = special.id_of("pad", self._tokenizer.token_to_id, self.vocab_size)
        self.adds_bos = self._template_adds_bos() if special.adds_bos is None else special.adds_bos
        added = parsed.get("added_tokens") or []
        if self.is_made:
            self._check_added_ids(added)
        class_tokens = known_tokenizer(special.tokenizer_class, self._tokenizer.token_to_id)
        begin = (self.bos_id,) if self.adds_bos else tuple(map(self._tokenizer.token_to_id, class_tokens.prefix))
        self.prefix_ids = tuple(id for id in begin if id is not None)
        ends = map(self._tokenizer.token_to_id, class_tokens.ends)
        self.end_ids = tuple(id for id in ends if id is not None)
        self.chat_template = chat_template or class_tokens.template
        self.special_names: Sequence[str] = [token["content"] for token in added if token["special"]]
        ids = {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id}
        self.special_tokens: Mapping[str, Any] = special.template_variables(
            lambda id: str(self._tokenizer.id_to_token(id)), ids
        )

    @contextmanager
    def _refusing(self, message: str, *kinds: type[Exception]) -> Iterator[None]:
        """Raise UserError for errors of these kinds, and for panics of the library, which are not an ``Exception``."""
        try:
            yield
        except kinds as error:
            raise UserError(f"{self.path}: {message} ({shortened(str(error), 300)})") from error
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise UserError(f"{self.path}: {message} ({shortened(str(error), 300)})") from None

    def _check_added_ids(self, added: Sequence[dict[str, Any]]) -> None:
        """Refuse added tokens with ids that the library cannot assign: it numbers them from the end of the vocabulary."""
        for token in added:
            token_id = self._tokenizer.token_to_id(token["content"])
            if token_id != token["id"]:
                name = shortened(token["content"])
                raise UserError(
                    f"{self.path}: the files beside it give {name} the id {token['id']}, which has to be {token_id}"
                )

    def _refuse_long(self, text: str) -> None:
        if len(text) * self._growth > LONGEST_TEXT:
            raise UserError(
                f"{self.path}: may make {len(text) * self._growth:,.0f} characters of a text of {len(text):,}; at most "
                f"{LONGEST_TEXT:,} are encoded at once, divide the text"
            )

    def _template_adds_bos(self) -> bool:
        """Return True if the template of the file puts the beginning-of-text token before a text."""
        with self._refusing("cannot encode a text", Exception):
            return self.bos_id is not None and self._tokenizer.encode("a").ids[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` alone."""
        self._refuse_long(text)
        with self._refusing("cannot encode a text", Exception):
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def allowing(self, names: Sequence[str]) -> JsonTokenizer:
        """Return this tokenizer, which takes ``names`` in a text for the special tokens that they are.

        The library finds added tokens that are not special in every text, so these are made such.
        """
        from tokenizers import Tokenizer as FastTokenizer

        without_allowed(self, names)
        content = json.loads(self.content)
        for token in content.get("added_tokens") or []:
            token["special"] = token["special"] and token["content"] not in names
        changed = copy.copy(self)
        with self._refusing("not a tokenizer.json", Exception):
            changed._tokenizer = FastTokenizer.from_str(json.dumps(content))
        changed._tokenizer.encode_special_tokens = True
        changed._tokenizer.no_truncation()
        changed._tokenizer.no_padding()
        changed.allowed_special_tokens = tuple(names)
        return changed

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``text`` with its special tokens, and their places."""
        self._refuse_long(text)
        with self._refusing("cannot encode a text", Exception):
            encoding = self._with_special_tokens.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def fingerprint(self) -> str:
        """Return the fingerprint. It is lazy: it takes as long as loading, and prediction does not need it."""
        return _json_fingerprint(parse_json(self.content))

    @cached_property
    def _with_special_tokens(self) -> FastTokenizer:
        """Return a tokenizer that encodes names as tokens, without post-processor, which would shift places."""
        from tokenizers import Tokenizer as FastTokenizer

        plain = {**json.loads(self.content), "post_processor": None, "truncation": None, "padding": None}
        with self._refusing("not a tokenizer.json", Exception):
            return FastTokenizer.from_str(json.dumps(plain))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        with self._refusing("cannot decode tokens"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token(self, id: int) -> str:
        """Return the name of a token."""
        return self._tokenizer.id_to_token(id) or ""


def is_cuttable(tokenizer: Tokenizer) -> bool:
    """Return True if a text can be encoded in pieces that end with a line.

    That is not possible if the tokenizer puts something before every text, or an allowed token strips line breaks around it.
    """
    pieces = [
        ("x\n", "y"),
        *(pair for name in tokenizer.allowed_special_tokens for pair in ((f"{name}\n", "y"), ("x\n", name))),
    ]
    if any("\n" in name for name in tokenizer.allowed_special_tokens):
        return False
    return all(
        tokenizer.encode(first + second) == tokenizer.encode(first) + tokenizer.encode(second)
        for first, second in pieces
    )


def _json_fingerprint(content: dict[str, Any]) -> str:
    """Hash what decides the ids of a text, without padding, truncation, templates and the spelling of merges."""
    model = dict(content["model"])
    model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
    added = [(token["id"], token["content"], token["special"]) for token in content.get("added_tokens") or []]
    parts = [model, content.get("normalizer"), content.get("pre_tokenizer"), added]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def run_tokenizer(config: RunConfig) -> Tokenizer:
    """Load ``processor.tokenizer.vocab_file``.

    Raises:
        UserError: the file is missing or no tokenizer, or it has tokens that the model has no row for.
    """
    tokenizer, rows = load_tokenizer(config.processor.tokenizer.vocab_file), config.model.config.vocab_size
    if tokenizer.vocab_size > rows:
        raise config.error(
            "model.model_config.vocab_size",
            f"the tokenizer {tokenizer.path} has {tokenizer.vocab_size} tokens, more than the model's {rows} (value {rows}); "
            "give the tokenizer the model was made with",
        )
    return tokenizer
