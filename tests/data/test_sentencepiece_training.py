"""A trained sentencepiece model gives every text back, does not depend on the run, and is one that transformers reads."""

import json
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.data import load_tokenizer
from mindllm.data.tokenizers.files import copy_tokenizer
from mindllm.data.tokenizers.sentencepiece_tokenizer import (
    save_tokenizer,
    train_byte_level_bpe,
    train_sentencepiece,
    train_tokenizer,
)
from mindllm.data.tokenizers.tokenizer import is_cuttable
from mindllm.errors import UserError

TEXTS = [Path(module.__file__).read_text(encoding="utf-8") for module in (json.decoder, textwrap)]
CODE = "def f3(x):\n\n    return  [x + 42]  # été €\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "tokenizer.model"
    train_tokenizer(TEXTS, 500, path)
    return path


@given(text=st.text(st.characters(exclude_characters="\0▁", exclude_categories=["Cs"])))
def test_every_text_comes_back(path, text):
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sizes_and_special_tokens(path):
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (500, 1, 2, None)
    assert len(tokenizer.encode("return x")) < len("return x") / 2, "it learned the words"
    assert tokenizer.decode([*tokenizer.encode("a"), 4000]) == "a", "ids of rows that pad a model have no text"


def test_training_again_gives_the_same_bytes(path):
    assert train_sentencepiece(iter(TEXTS), 500) == path.read_bytes()


def test_a_long_line_is_learned_from(tmp_path):
    train_tokenizer(["word " * 10_000], 266, tmp_path / "long.model")
    assert len(load_tokenizer(tmp_path / "long.model").encode("word word")) < 9


def test_text_may_be_encoded_in_pieces(path):
    assert is_cuttable(load_tokenizer(path))


@pytest.mark.parametrize(
    ("texts", "size", "words"),
    [(TEXTS, 100, "ask for at least"), (["ab"], 5000, "Vocabulary size too high"), ([""], 300, "cannot train 300")],
)
def test_sizes_that_cannot_be_reached_are_told(texts, size, words, tmp_path):
    with pytest.raises(UserError, match=words) as error:
        train_tokenizer(texts, size, tmp_path / "t.model")
    assert "--" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json", "other.json"])
def test_transformers_reads_what_is_copied_and_encodes_alike(path, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    source = path if kind == "tokenizer.model" else tmp_path / kind
    if kind != "tokenizer.model":
        save_tokenizer(train_byte_level_bpe(TEXTS, 400), source)
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|endoftext|>"}))
    target = tmp_path / "copy"
    target.mkdir()
    copy_tokenizer(load_tokenizer(source), target)
    assert (target / "special_tokens_map.json").exists() == (kind == "tokenizer.json"), "others' files are left"
    (target / "config.json").write_text('{"model_type": "llama"}')
    theirs, ours = transformers.AutoTokenizer.from_pretrained(target), load_tokenizer(target)
    assert theirs.encode(CODE, add_special_tokens=False) == load_tokenizer(source).encode(CODE)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_id, ours.bos_id)
    assert (theirs.encode("x")[0] == ours.bos_id) == ours.adds_bos
