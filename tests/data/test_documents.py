"""Documents of a sample kept apart: where they begin, their positions, the loss; blends of corpora."""

import numpy as np
import pytest
from corpora import EOD, write_texts
from hypothesis import given
from hypothesis import strategies as st

from mindllm.data import BlendedDataset, DocumentOptions, GPTDataset, HeldOutDataset, JoinedSamples
from mindllm.data.documents import positions, segment_starts
from mindllm.data.loader import PERIOD, shares
from mindllm.errors import UserError

ends_of_documents = st.lists(st.booleans(), min_size=1, max_size=40)


@given(ends_of_documents)
def test_a_document_begins_after_the_end_of_the_one_before(ends):
    starts = segment_starts(np.array(ends))
    expected, start = [], 0
    for index, end in enumerate(ends):
        expected.append(start)
        start = index + 1 if end else start
    assert starts.tolist() == expected
    assert positions(starts).tolist() == [index - first for index, first in enumerate(expected)]
    assert starts.dtype == positions(starts).dtype == np.int32


def test_samples_carry_what_is_asked_for_and_nothing_else(tmp_path):
    split = write_texts(tmp_path / "a", ["one", "two", "three four"] * 5).split("train", "1")
    plain = GPTDataset(split, 12, 0, DocumentOptions(EOD)).sample(3)
    assert set(plain) == {"input_ids", "labels", "loss_mask"}
    apart = GPTDataset(split, 12, 0, DocumentOptions(EOD, True, True, True)).sample(3)
    assert np.array_equal(apart["input_ids"], plain["input_ids"])
    ends = plain["input_ids"] == EOD
    assert ends.any()
    assert np.array_equal(apart["loss_mask"], 1.0 - ends)
    assert np.array_equal(apart["segment_starts"], segment_starts(ends))
    assert np.array_equal(apart["position_ids"], positions(segment_starts(ends)))
    held_out = HeldOutDataset(split, 12, DocumentOptions(EOD, True, True, True)).sample(0)
    assert held_out["loss_mask"].all(), "every token of held-out text counts"
    assert set(held_out) == set(apart)


@pytest.mark.parametrize("option", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_without_an_end_of_document_token_nothing_can_be_kept_apart(option):
    with pytest.raises(UserError, match=f"{option} needs an end-of-document token"):
        DocumentOptions(**{option: True})


class Counting:
    sample_count = None
    samples_per_epoch = 7

    def __init__(self, name):
        self.name = name

    def sample(self, index):
        return {"part": self.name, "index": index}


weights_of = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(weights_of, st.integers(0, 3 * PERIOD))
def test_a_blend_takes_every_sample_of_its_parts_in_order(weights, start):
    blend = BlendedDataset([Counting(part) for part in range(len(weights))], weights)
    found = [blend.sample(index) for index in range(start, start + 50)]
    for part in range(len(weights)):
        numbers = [sample["index"] for sample in found if sample["part"] == part]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    assert blend.samples_per_epoch == 7 * len(weights)


@given(weights_of, st.integers(1, 2 * PERIOD))
def test_every_beginning_of_a_blend_keeps_the_weights(weights, count):
    """Whatever the length of a run, and from the first sample on; so also a run that resumes."""
    blend = BlendedDataset([Counting(part) for part in range(len(weights))], weights)
    taken = np.zeros(len(weights))
    places = {blend.place(index)[0]: blend.place(index)[1] for index in range(max(0, count - 60), count)}
    for part, number in places.items():
        taken[part] = number + 1
        share = weights[part] / sum(weights)
        assert abs(taken[part] - share * count) < 0.6 * len(weights) + 60 * share + count / PERIOD


@given(weights_of, st.integers(0, 1000))
def test_shares_are_whole_and_add_up(weights, total):
    counts = shares(weights, total)
    assert sum(counts) == total
    assert all(
        abs(count - weight / sum(weights) * total) < 1 + 1e-6 for count, weight in zip(counts, weights, strict=True)
    )


def test_a_part_without_weight_is_refused():
    with pytest.raises(UserError, match="weight 1e-09 is less than"):
        BlendedDataset([Counting(0), Counting(1)], [1.0, 1e-9])


def test_joined_samples_follow_one_another(tmp_path):
    splits = [write_texts(tmp_path / name, [name * 9]).split("train", "1") for name in "ab"]
    parts = [HeldOutDataset(split, 4, DocumentOptions(EOD)) for split in splits]
    joined = JoinedSamples(parts)
    assert joined.sample_count == 6
    labels = [joined.sample(index)["labels"].tolist() for index in range(6)]
    assert labels == [part.sample(index)["labels"].tolist() for part in parts for index in range(3)]
    assert not joined.sample(6)["loss_mask"].any()
