"""Training of tokenizers on a text: byte-level BPE (``tokenizer.json``) and sentencepiece (``tokenizer.model``)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.data.tokenizers.special_tokens import END_OF_TEXT
from mindllm.errors import UserError
from mindllm.files import atomic_open, atomic_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

TRAINED_KINDS = {".json": "(byte-level BPE)", ".model": "(sentencepiece)"}
LONGEST_LINE = 4000  # bytes; the library leaves out longer ones


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path, at_most: bool = False) -> None:
    """Trains the kind of tokenizer that the suffix of ``path`` says (:data:`TRAINED_KINDS`) and writes it.

    ``at_most``: a byte-level BPE may have fewer tokens, where the texts give no more.
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
    """Trains a byte-level BPE (Radford et al. 2019): any text is representable, decoding gives the text back.

    The result depends on the texts and the sizes only, not on threads or the run. Special tokens have the first ids.
    Raises UserError when ``vocab_size`` is below the 256 bytes and special tokens, or, but for ``at_most``, the texts do not
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
    """Writes a trained tokenizer as a ``tokenizer.json``, whole or not at all."""
    with atomic_path(path) as temporary:
        tokenizer.save(str(temporary))


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a sentencepiece BPE (Kudo and Richardson 2018) as Llama's is: bytes for what it has no token for, single digits.

    Unlike Llama's it keeps a text as it is: no space is put before it, none are joined. Tokens 0, 1, 2 are ``<unk>``,
    ``<s>``, ``</s>``. The result depends on the texts and the size only. Returns the bytes of the ``.model`` file.
    Raises UserError when the texts do not fill ``vocab_size``, or it is below the bytes and characters.
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
    """Lines, long ones in parts: what the library takes for sentences. A line break is spelled in bytes, as by Llama's."""
    for text in texts:
        for line in text.replace("\0", "").splitlines():
            for start in range(0, len(line), LONGEST_LINE // 4):
                yield line[start : start + LONGEST_LINE // 4]


def _reason(error: RuntimeError) -> str:
    """Sentencepiece's message without the place in its source and the options of its own command line."""
    text = re.sub(r"^.*\] ", "", str(error)).strip()
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", text)
    if smallest:
        return f"the bytes and their characters are {smallest[1]} already, ask for at least that many"
    return text or "they are empty"
