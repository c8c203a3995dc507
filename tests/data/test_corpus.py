"""Corpora with their extra files: splits that share no document, checks against tokenizers, statistics."""

import json
import math

import numpy as np
import pytest
from corpora import EOD, byte_tokenizer, write_numbered, write_texts
from hypothesis import assume, given
from hypothesis import strategies as st

from mindllm.data import Corpus, bits_per_byte, bytes_per_token, unigram_loss
from mindllm.data.corpus import byte_count, byte_counts_path, corpus_files, meta_path, split_ranges
from mindllm.errors import UserError

TEXTS = ["one\n", "zwei é\n", "", "three three\n", "🙂"]


@given(
    weights=st.lists(st.floats(0, 1000, allow_subnormal=False), min_size=1, max_size=3),
    documents=st.integers(0, 5000),
)
def test_splits_share_no_document_and_leave_none_out(weights, documents):
    assume(sum(weights) > 1e-3)
    ranges = split_ranges(",".join(map(str, weights)), documents)
    joined = [document for name in ("train", "valid", "test") for document in ranges[name]]
    assert joined == list(range(documents))


def test_split_is_megatrons():
    assert split_ranges("949,50,1", 734) == {"train": range(697), "valid": range(697, 733), "test": range(733, 734)}
    assert split_ranges("1", 5)["valid"] == range(5, 5)


@pytest.mark.parametrize("weights", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf"])
def test_weights_that_are_none(weights):
    with pytest.raises(UserError, match="write weights"):
        split_ranges(weights, 10)


def test_texts_come_back_with_their_bytes(tmp_path):
    corpus = write_texts(tmp_path / "a", TEXTS)
    tokenizer = byte_tokenizer()
    assert [tokenizer.decode(document[:-1]) for document in corpus.dataset] == TEXTS
    assert all(document[-1] == EOD for document in corpus.dataset)
    assert corpus.byte_counts.tolist() == [len(text.encode()) for text in TEXTS]
    assert (corpus.meta.bytes, corpus.eod_id) == (28, EOD)
    assert sorted(tmp_path.iterdir()) == sorted(corpus_files(tmp_path / "a"))


def test_documents_without_end(tmp_path):
    corpus = write_texts(tmp_path / "a", TEXTS, append_eod=False)
    assert corpus.eod_id is None
    assert corpus.dataset.token_count == corpus.meta.bytes
    with pytest.raises(UserError, match="no-append-eod"):
        write_texts(tmp_path / "b", TEXTS, byte_tokenizer(eos_id=None))


def test_bytes_of_a_split_noted_and_decoded_agree(tmp_path):
    corpus = write_texts(tmp_path / "a", TEXTS)
    noted = [byte_count(corpus.split(name, "2,2,1")) for name in ("train", "valid", "test")]
    for path in (meta_path(tmp_path / "a"), byte_counts_path(tmp_path / "a")):
        path.unlink()
    bare = Corpus(tmp_path / "a", byte_tokenizer())
    assert [byte_count(bare.split(name, "2,2,1")) for name in ("train", "valid", "test")] == noted == [12, 12, 4]
    assert bytes_per_token([bare.split("train", "2,2,1")]) == 12 / 14
    assert bytes_per_token([Corpus(tmp_path / "a").split("train")]) is None


def test_bytes_of_the_beginning_of_a_split_are_those_of_its_documents(tmp_path):
    """What ``max_batches`` evaluates: whole documents, and of the one that is cut its bytes in proportion."""
    tokenizer = byte_tokenizer()
    split = write_texts(tmp_path / "a", ["ascii text", "größer üben", "x" * 20], tokenizer).split("train", "1")
    first = int(split.document_starts[1])
    assert byte_count(split, first) == len("ascii text")
    assert byte_count(split, split.token_count) == byte_count(split)
    half = byte_count(split, first + (int(split.document_starts[2]) - first) // 2)
    assert len("ascii text") < half < len("ascii text") + len("größer üben".encode())
    assert bytes_per_token([split], [first]) == len("ascii text") / first


def test_bits_per_byte_of_a_uniform_model_over_bytes_is_eight():
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8.0)


def test_unigram_loss_is_that_of_the_definition(tmp_path):
    corpus = write_texts(tmp_path / "a", ["aab", "abc"])
    train, valid = corpus.split("train", "1,1"), corpus.split("valid", "1,1")
    tokens = [ord(character) + 1 for character in "aab"] + [EOD]
    expected = 0.0
    for token in [ord(character) + 1 for character in "abc"] + [EOD]:
        expected -= math.log((tokens.count(token) + 1) / (4 + 257)) / 4
    assert unigram_loss([train], [valid], 257) == pytest.approx(expected)
    with pytest.raises(UserError, match="vocab_size is 90"):
        unigram_loss([train], [valid], 90)


def test_corpus_of_another_tokenizer_is_refused(tmp_path):
    write_texts(tmp_path / "a", TEXTS)
    with pytest.raises(UserError, match="another tokenizer"):
        Corpus(tmp_path / "a", byte_tokenizer(fingerprint="other"))


def test_extra_files_that_do_not_belong(tmp_path):
    write_texts(tmp_path / "a", TEXTS)
    np.save(byte_counts_path(tmp_path / "a"), np.arange(3))
    with pytest.raises(UserError, match=r"a\.bytes\.npy"):
        Corpus(tmp_path / "a")
    byte_counts_path(tmp_path / "a").unlink()
    with pytest.raises(UserError, match=r"a\.bytes\.npy"):
        Corpus(tmp_path / "a")
    write_numbered(tmp_path / "b", [2, 3])
    meta_path(tmp_path / "b").write_bytes(meta_path(tmp_path / "a").read_bytes())
    byte_counts_path(tmp_path / "b").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"b\.(meta\.json|bytes\.npy)"):
        Corpus(tmp_path / "b")
    meta_path(tmp_path / "a").write_text(json.dumps({"documents": 3}))
    with pytest.raises(UserError, match="not a description"):
        Corpus(tmp_path / "a")


def test_split_without_tokens_and_unknown_split(tmp_path):
    corpus = write_texts(tmp_path / "a", TEXTS)
    with pytest.raises(UserError, match="leaves no tokens for test"):
        corpus.split("test", "9,1,0")
    with pytest.raises(UserError, match="did you mean 'valid'"):
        corpus.split("validation", "9,1,0")


def test_error_while_writing_leaves_nothing(tmp_path):
    def texts():
        yield "one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_texts(tmp_path / "a", texts())
    assert list(tmp_path.iterdir()) == []
