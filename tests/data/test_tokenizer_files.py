"""Tokenizers: lossless byte-level BPE, deterministic training, special names in text, both file kinds, refusals."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.data.tokenizers.special_tokens import END_OF_TEXT
from mindllm.data.tokenizers.tokenizer import load_tokenizer
from mindllm.errors import UserError

TEXTS = [f"def f{i % 7}(x):\n    return x + {i}  # été\n" for i in range(200)]


@pytest.fixture(scope="module")
def json_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(train_byte_level_bpe(TEXTS, 290), path)
    return path


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory):
    import sentencepiece

    directory = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return directory / "tokenizer.model"


@given(text=st.text())
def test_byte_level_bpe_gives_every_text_back(json_path, text):
    tokenizer = load_tokenizer(json_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_and_sizes(json_path):
    tokenizer = load_tokenizer(json_path)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (290, 0, None)


def test_name_of_a_special_token_in_a_text_stays_text(json_path):
    tokenizer = load_tokenizer(json_path)
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


def test_training_does_not_depend_on_hash_seeds_or_threads(tmp_path, json_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_tokenizer_files import TEXTS, save_tokenizer, train_byte_level_bpe\n"
        "save_tokenizer(train_byte_level_bpe(iter(TEXTS), 290), sys.argv[1])"
    )
    here = os.path.dirname(__file__)  # noqa: PTH120
    for threads in ("1", "3"):
        path = tmp_path / f"{threads}.json"
        environment = dict(os.environ, RAYON_NUM_THREADS=threads, PYTHONHASHSEED=threads)
        subprocess.run([sys.executable, "-c", code, str(path), here], env=environment, check=True, timeout=60)
        assert path.read_bytes() == json_path.read_bytes()


def test_vocabulary_that_cannot_be_reached():
    with pytest.raises(UserError, match="at least 257"):
        train_byte_level_bpe(TEXTS, 100)
    with pytest.raises(UserError, match="give only"):
        train_byte_level_bpe(["ab"], 5000)


def test_fingerprint_sees_the_ids_and_nothing_else(tmp_path, json_path):
    content = json.loads(json_path.read_text())
    original = load_tokenizer(json_path).fingerprint
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "same.json").write_text(json.dumps(content, indent=3))
    same = load_tokenizer(tmp_path / "same.json")
    assert same.fingerprint == original
    assert same.encode(TEXTS[0]) == load_tokenizer(json_path).encode(TEXTS[0])
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path / "other.json").fingerprint != original


@pytest.mark.parametrize("eos", ["Ġreturn", {"content": "Ġreturn", "lstrip": False}])
def test_tokenizer_config_names_the_special_tokens(tmp_path, json_path, eos):
    (tmp_path / "tokenizer.json").write_bytes(json_path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "bos_token": None}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([tokenizer.eos_id]) == " return"


def test_sentencepiece(sentencepiece_path):
    tokenizer = load_tokenizer(sentencepiece_path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (290, 1, 2)
    ids = tokenizer.encode("def f1(x): </s> é🙂")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "def f1(x): </s> é🙂"


def test_not_a_tokenizer(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer.txt"):
        (tmp_path / name).write_bytes(b"not a tokenizer")
    for path in [tmp_path / "none.json", *tmp_path.iterdir()]:
        with pytest.raises(UserError) as error:
            load_tokenizer(path)
        assert str(path) in str(error.value)
