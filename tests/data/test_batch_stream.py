"""Batches: a function of the step, slices of hosts, reading ahead, errors and leaving early."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from corpora import EOD, write_numbered, write_texts
from hypothesis import given
from hypothesis import strategies as st

from mindllm.data import BatchStream, DocumentOptions, EvaluationStream, GPTDataset, HeldOutDataset
from mindllm.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("corpus") / "a", [13, 40, 7, 22, 5, 61, 18])


def training_stream(corpus, batch=8, **options):
    return BatchStream(GPTDataset(corpus.split("train", "1"), 10, seed=3), batch, **options)


def equal(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_shapes_and_types(corpus):
    batch = training_stream(corpus).batch(0)
    assert {name: (array.dtype.name, array.shape) for name, array in batch.items()} == {
        "input_ids": ("int32", (8, 10)),
        "labels": ("int32", (8, 10)),
        "loss_mask": ("float32", (8, 10)),
    }


@given(step=st.integers(0, 500))
def test_a_batch_depends_on_its_step_only(corpus, step):
    resumed = next(training_stream(corpus).iterate(step, step + 1))
    stream = training_stream(corpus)
    stream.batch(step // 2)
    assert equal(stream.batch(step), resumed)


@given(step=st.integers(0, 50), readers=st.sampled_from([1, 2, 4, 8]))
def test_slices_of_the_readers_are_the_global_batch(corpus, step, readers):
    slices = [training_stream(corpus, rank=rank, rank_count=readers).batch(step) for rank in range(readers)]
    joined = {name: np.concatenate([part[name] for part in slices]) for name in slices[0]}
    assert equal(joined, training_stream(corpus).batch(step))


@given(step=st.integers(0, 50), readers=st.sampled_from([1, 2, 4, 8]))
def test_random_keys_belong_to_samples(corpus, step, readers):
    options = {"random_seed": 5, "rank_count": readers}
    slices = [training_stream(corpus, rank=rank, **options).batch(step)["random_keys"] for rank in range(readers)]
    keys = np.concatenate(slices)
    assert (keys.dtype, keys.shape) == (np.int32, (8, 10))
    assert np.array_equal(keys, training_stream(corpus, random_seed=5).batch(step)["random_keys"])
    other = [training_stream(corpus, random_seed=seed).batch(number) for seed, number in ((6, step), (5, step + 1))]
    assert np.all(keys & 1)
    assert len(np.unique(np.stack([keys, *(batch["random_keys"] for batch in other)]))) == 3 * keys.size


@pytest.mark.parametrize("options", [{"rank_count": 3}, {"rank": 2, "rank_count": 2}, {"rank": -1, "rank_count": 2}])
def test_impossible_division(corpus, options):
    with pytest.raises(UserError, match="cannot be divided"):
        training_stream(corpus, **options)


@pytest.mark.parametrize("ahead", [0, 1, 5, 100])
def test_reading_ahead_changes_nothing(corpus, ahead):
    stream = training_stream(corpus)
    batches = list(stream.iterate(3, 12, ahead=ahead))
    assert len(batches) == 9
    assert all(equal(batch, stream.batch(step)) for step, batch in enumerate(batches, start=3))


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_leaving_the_loop_ends_the_thread(corpus):
    for _ in training_stream(corpus).iterate(0, 10**9):
        assert reading_threads()
        break
    assert not reading_threads()


def test_interrupt_in_the_loop_ends_the_thread(corpus):
    def train():
        for _ in training_stream(corpus).iterate(0, 10**9):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert not reading_threads()


def test_error_is_raised_at_its_batch(corpus):
    class Failing:
        sample_count = None
        good = training_stream(corpus).source

        def sample(self, index):
            if index == 3:
                raise OSError("disk is gone")
            return self.good.sample(index)

    batches = BatchStream(Failing(), 1).iterate(0, 10)
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(OSError, match="disk is gone"):
        next(batches)
    assert not reading_threads()


def test_token_beyond_the_vocabulary_is_refused(corpus):
    with pytest.raises(UserError, match="vocab_size is 100"):
        list(training_stream(corpus, vocab_size=100).iterate(0, 20))
    training_stream(corpus, vocab_size=166).batch(0)


def test_evaluation_covers_the_split_and_pads_rows(tmp_path):
    split = write_texts(tmp_path / "a", ["abcdefg", "hij"]).split("train", "1")
    stream = EvaluationStream(HeldOutDataset(split, 3, DocumentOptions(EOD)), 4)
    batches = list(stream)
    assert len(batches) == len(stream) == 1
    assert batches[0]["input_ids"].shape == (4, 3)
    assert batches[0]["loss_mask"].sum() == split.token_count == 12
    small = EvaluationStream(HeldOutDataset(split, 3, DocumentOptions(EOD)), 3)
    assert [batch["loss_mask"].sum() for batch in small] == [9, 3]
    assert len(EvaluationStream(HeldOutDataset(split, 3), 1, max_batches=2)) == 2
    with pytest.raises(ValueError, match="source that ends"):
        EvaluationStream(GPTDataset(split, 3, 0), 1)


def test_importing_the_room_imports_no_framework():
    code = "import sys, mindllm.data; assert not {'mindspore', 'torch', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
