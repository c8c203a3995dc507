"""Where a run continues in its data: after the samples that were consumed, whatever the batch size was and is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from run_fixtures import load, minimal, write  # noqa: F401 (fixtures)

from mindllm.data import BatchStream
from mindllm.train.batches.datasets import RunData
from mindllm.train.job.resume import restore, run_state, sample_offset
from mindllm.train.optimizers.loss_scale import LossScaler
from mindllm.train.state import RunState

SAMPLES = 24  # of an epoch


class Numbered:
    """Samples that hold their own number."""

    sample_count = None
    samples_per_epoch = SAMPLES

    def sample(self, index):
        row = np.full(4, index, np.int32)
        return {"input_ids": row, "labels": row, "loss_mask": np.ones(4, np.float32)}


class Engine:
    simulated = False

    def load(self, checkpoint):
        pass


@pytest.fixture
def begin(load):  # noqa: F811 (a fixture)
    """Returns the state of a run with a batch size, and its stream; of a run that goes on, from what was saved."""

    def begin_run(batch, saved=None):
        config = load(f"--runner_config.batch_size={batch}", "--runner_config.epochs=2")
        data = RunData.__new__(RunData)
        data.config, data.share, data.model = config, SimpleNamespace(index=0, count=1), config.model.config
        data.text, data.sample_offset = SimpleNamespace(train_dataset=Numbered), 0
        checkpoint = None if saved is None else SimpleNamespace(state=saved, path="llm-4", step=saved["step"])
        if checkpoint is not None:
            data.sample_offset = sample_offset(config, checkpoint)
        scaler = LossScaler(config.runner_wrapper.scale_sense)
        state = RunState(config, Engine(), scaler, data.total_steps, data.steps_per_epoch)
        if checkpoint is not None:
            restore(state, checkpoint)
        return state, data.train_stream()

    return begin_run


def consume(state, stream, steps):
    """Numbers of the samples of so many further steps."""
    stop = state.step + steps
    numbers = [int(row[0]) for batch in stream.iterate(state.step, stop) for row in batch["input_ids"]]
    state.step = stop
    return numbers


@pytest.mark.parametrize("sizes", [(2, 4, 3), (4, 2, 8), (3, 3, 3)])
def test_a_resume_with_another_batch_size_neither_skips_nor_repeats_samples(begin, sizes):
    consumed, saved = [], None
    for size in sizes:
        state, stream = begin(size, saved)
        consumed += consume(state, stream, 3)
        saved = run_state(state)
        assert saved["consumed_samples"] == len(consumed)
    assert consumed == list(range(len(consumed)))


def test_the_run_ends_after_as_many_epochs_and_names_the_epoch_it_is_in(begin):
    state, stream = begin(2)
    assert state.total_steps == 2 * SAMPLES // 2
    consume(state, stream, 6)
    state, stream = begin(4, run_state(state))
    assert (state.step, state.total_steps) == (6, 6 + (2 * SAMPLES - 12) // 4)
    assert state.place_in_epoch(7) == (1, 4)
    assert state.place_in_epoch(9) == (1, 6)
    assert state.place_in_epoch(10) == (2, 1)
    assert state.place_in_epoch(state.total_steps)[0] == 2


def test_a_checkpoint_without_consumed_samples_falls_back_to_its_batch_size(begin):
    state, stream = begin(2)
    consume(state, stream, 4)
    saved = run_state(state)
    del saved["consumed_samples"]
    state, stream = begin(4, saved)
    assert consume(state, stream, 1) == [8, 9, 10, 11]


def test_readers_share_a_batch_that_begins_anywhere():
    whole = BatchStream(Numbered(), 4, offset=3, random_seed=1).batch(2)
    parts = [BatchStream(Numbered(), 4, rank=rank, rank_count=2, offset=3, random_seed=1).batch(2) for rank in (0, 1)]
    for name, values in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
    assert whole["input_ids"][:, 0].tolist() == [11, 12, 13, 14]
    same = BatchStream(Numbered(), 1, offset=0, random_seed=1).batch(11)
    for name, values in same.items():
        np.testing.assert_array_equal(values[0], whole[name][0], err_msg="what is drawn belongs to the sample")
