"""Samples for pretraining and evaluation: every token once per epoch, order by seed alone, boundaries, padding."""

from itertools import pairwise

import numpy as np
import pytest
from corpora import EOD, write_numbered, write_texts
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindllm.data import DocumentOptions, GPTDataset, HeldOutDataset
from mindllm.errors import UserError

lengths_of = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    directory = tmp_path_factory.mktemp("numbered")
    counter = iter(range(10**6))

    def make(lengths):
        return write_numbered(directory / str(next(counter)), lengths).split("train", "1")

    return make


@settings(max_examples=60)
@given(lengths=lengths_of, seq_length=st.integers(1, 40), seed=st.integers(0, 2**63), epochs=st.integers(1, 4))
def test_every_token_is_seen_once_per_epoch(numbered, lengths, seq_length, seed, epochs):
    assume(sum(lengths))
    dataset = GPTDataset(numbered(lengths), seq_length, seed)
    total = sum(lengths)
    samples = -(-epochs * total // seq_length)  # all that begin in these epochs
    seen = np.bincount(np.concatenate([dataset[index][:-1] for index in range(samples)]), minlength=total)
    assert seen.min() >= epochs
    assert seen.sum() - epochs * total < seq_length  # the last sample reaches into the next epoch


@settings(max_examples=60)
@given(lengths=lengths_of, seq_length=st.integers(1, 40), seed=st.integers(0, 99), index=st.integers(0, 60))
def test_a_sample_is_runs_of_documents(numbered, lengths, seq_length, seed, index):
    """Inside a sample the next token is the next of the document, or the first of one where a document ended."""
    assume(sum(lengths))
    tokens = GPTDataset(numbered(lengths), seq_length, seed)[index]
    ends = np.cumsum(lengths)
    starts = set((ends - lengths).tolist())
    assert tokens.dtype == np.int32
    assert len(tokens) == seq_length + 1
    for token, following in pairwise(tokens):
        assert following == token + 1 or (token + 1 in ends and int(following) in starts)


def test_order_depends_on_seed_and_epoch_only(numbered):
    split = numbered([7, 5, 9, 11, 8])
    order = [GPTDataset(split, 4, 1)[index].tolist() for index in range(20)]
    again = GPTDataset(split, 4, 1)
    assert [again[index].tolist() for index in reversed(range(20))] == order[::-1]
    other = GPTDataset(split, 4, 2)
    assert [other[index].tolist() for index in range(20)] != order
    assert order[:10] != order[10:]


def test_order_never_changes(numbered):
    """A run of years ago must resume today: these numbers are part of the interface."""
    dataset = GPTDataset(numbered([7, 5, 9, 11, 8]), 5, 42)
    assert [dataset[index].tolist()[0] for index in range(10)] == [2, 21, 37, 31, 7, 16, 32, 26, 19, 26]
    assert dataset.samples_per_epoch == 8


def test_loss_after_the_end_of_a_document(tmp_path):
    split = write_texts(tmp_path / "a", ["ab", "cde", "f"] * 5).split("train", "1")
    plain = GPTDataset(split, 8, 0, DocumentOptions(EOD)).sample(0)
    masked = GPTDataset(split, 8, 0, DocumentOptions(EOD, eod_mask_loss=True)).sample(0)
    assert plain["loss_mask"].tolist() == [1.0] * 8
    assert masked["loss_mask"].tolist() == [float(token != EOD) for token in masked["input_ids"]]
    assert 0.0 in masked["loss_mask"]
    assert (masked["labels"][:-1] == masked["input_ids"][1:]).all()
    with pytest.raises(UserError, match="eod_mask_loss needs"):
        DocumentOptions(eod_mask_loss=True)


@settings(max_examples=60)
@given(lengths=lengths_of, seq_length=st.integers(1, 40), with_eod=st.booleans())
def test_held_out_tokens_are_predicted_once_in_order(numbered, lengths, seq_length, with_eod):
    assume(sum(lengths) > 1)
    dataset = HeldOutDataset(numbered(lengths), seq_length, DocumentOptions(10**6 if with_eod else None))
    samples = [dataset.sample(index) for index in range(dataset.sample_count)]
    labels = np.concatenate([sample["labels"][sample["loss_mask"] > 0] for sample in samples])
    inputs = np.concatenate([sample["input_ids"][sample["loss_mask"] > 0] for sample in samples])
    text = np.arange(sum(lengths))
    assert labels.tolist() == (text if with_eod else text[1:]).tolist()
    assert inputs.tolist() == ([10**6] if with_eod else []) + text[:-1].tolist()
    assert dataset.token_count == len(labels)
    assert not dataset.sample(dataset.sample_count + 3)["loss_mask"].any()


def test_one_token_has_nothing_to_be_predicted_from(numbered):
    assert HeldOutDataset(numbered([1]), 4, DocumentOptions(9)).sample_count == 1
    with pytest.raises(UserError, match="nothing to predict"):
        HeldOutDataset(numbered([1]), 4)
