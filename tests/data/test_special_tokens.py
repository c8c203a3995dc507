"""The tokens that begin, end and pad a text are those that the files of a Hugging Face directory name."""

import json

import pytest

from mindllm.data import load_tokenizer
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe, train_sentencepiece
from mindllm.errors import UserError

NAMES = ["<|endoftext|>", "<s>", "</s>", "<|pad|>", "<|eot|>"]


@pytest.fixture
def directory(tmp_path):
    """A tokenizer.json whose tokens 0 to 4 are NAMES."""
    save_tokenizer(train_byte_level_bpe(["def main()"] * 9, 262, special_tokens=NAMES), tmp_path / "tokenizer.json")
    return tmp_path


def say(directory, **files):
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def special(directory):
    tokenizer = load_tokenizer(directory)
    return tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id


def test_usual_names_where_no_file_says(directory):
    assert special(directory) == (1, 0, 3)


def test_the_files_are_asked_in_their_order(directory):
    say(directory, generation_config={"bos_token_id": 4, "eos_token_id": [2, 4], "pad_token_id": 2})
    assert special(directory) == (4, 2, 2)
    say(directory, special_tokens_map={"bos_token": {"content": "<s>"}, "pad_token": "<|eot|>"})
    assert special(directory) == (1, 2, 4)
    say(directory, tokenizer_config={"eos_token": "<|eot|>", "bos_token": None, "pad_token": {"content": "</s>"}})
    assert special(directory) == (1, 4, 2)


def test_an_id_beyond_the_vocabulary_is_not_the_tokenizer_s(directory):
    say(directory, generation_config={"pad_token_id": 32000})
    assert special(directory) == (1, 0, 3)


def test_a_named_token_that_the_vocabulary_lacks_is_none(directory):
    say(directory, tokenizer_config={"eos_token": "<end>"})
    assert load_tokenizer(directory).eos_id is None


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_file_that_is_no_json_is_an_error(directory, content):
    (directory / "special_tokens_map.json").write_text(content)
    with pytest.raises(UserError, match=r"special_tokens_map\.json"):
        load_tokenizer(directory)


def test_a_text_begins_with_bos_where_the_tokenizer_says_so(directory):
    assert not load_tokenizer(directory).adds_bos
    content = json.loads((directory / "tokenizer.json").read_text())
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    names = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": names}
    say(directory, tokenizer={**content, "post_processor": template})
    assert load_tokenizer(directory).adds_bos
    assert load_tokenizer(directory).encode("a") == load_tokenizer(directory).encode("a")[-1:], "encode adds nothing"
    say(directory, tokenizer_config={"add_bos_token": False})
    assert not load_tokenizer(directory).adds_bos


def test_sentencepiece_has_its_own_and_the_files_win(tmp_path):
    texts = [f"def f{i % 7}(x):\n    return x + {i}\n" for i in range(200)]
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(texts, 300))
    assert special(tmp_path) == (1, 2, None)
    assert load_tokenizer(tmp_path).adds_bos
    say(tmp_path, tokenizer_config={"add_bos_token": False, "eos_token": "<s>"}, generation_config={"pad_token_id": 0})
    assert special(tmp_path) == (1, 1, 0)
    assert not load_tokenizer(tmp_path).adds_bos
