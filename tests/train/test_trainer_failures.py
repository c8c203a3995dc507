"""What an error in the training loop leaves behind: a checkpoint of the last step where the state is sound, else none."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from mindllm.config import load_config, override_config
from mindllm.errors import RunFailed, UserError
from mindllm.train.callbacks.callback import Callback
from mindllm.train.callbacks.checkpoint import CheckpointMonitor
from mindllm.train.callbacks.metrics import MetricsMonitor
from mindllm.train.checkpoint import CheckpointStore, RankTensors, load_checkpoint
from mindllm.train.engine import StepResult
from mindllm.train.job.ranks import SINGLE_RANK, Ranks
from mindllm.train.metrics_file import read_metrics
from mindllm.train.optimizers.loss_scale import LossScaler
from mindllm.train.state import RunState
from mindllm.train.trainer import StopSignals, Trainer
from mindllm.train.utilization import Peak

TINY = Path(__file__).parents[2] / "configs" / "llama2" / "pretrain_llama2_tiny.yaml"


class Counting:
    """An engine whose one weight counts its steps; it fails in step ``failing``."""

    simulated = False

    def __init__(self, failing=0, overflow=False):
        self.weight, self.failing, self.overflow = np.zeros(2, np.float32), failing, overflow

    def step(self, batch, rate, scale, limits, group_rates):
        if self.weight[0] + 1 == self.failing:
            raise ValueError("the device is gone")
        self.weight += 1
        return StepResult(1.0, 1.0, self.overflow, 8)

    def local_state(self):
        return {0: RankTensors({"weight": self.weight}, {})}


class Stream:
    """Batches that end with an error before step ``failing``."""

    def __init__(self, failing=10**9):
        self.failing = failing

    def iterate(self, first, last):
        for step in range(first + 1, last + 1):
            if step == self.failing:
                raise UserError(f"row of step {step} cannot be used")
            yield {"input_ids": np.zeros((1, 1))}


class Failing(Callback):
    """Fails after step 3."""

    def step_end(self, state, record):
        if record.step == 3:
            raise OSError(28, "No space left on device")


def train(tmp_path, engine=None, stream=None, callbacks=(), ranks=SINGLE_RANK, every=100):
    config = override_config(load_config(TINY), {"runner_config.train_steps": 6, "output_dir": str(tmp_path)})
    state = RunState(config, engine or Counting(), LossScaler(config.runner_wrapper.scale_sense), 6, 6)
    store = CheckpointStore(tmp_path / "checkpoint")
    monitors = [*callbacks, CheckpointMonitor(store, save_checkpoint_steps=every)]
    try:
        Trainer(state, stream or Stream(), lambda step: 0.1, monitors, Peak(1e12), ranks).run()
    finally:
        state.newest = store.newest()
        train.state = state
    return state


def saved_step():
    newest = train.state.newest
    if newest is None:
        return None
    checkpoint = load_checkpoint(newest)
    assert checkpoint.step == checkpoint.state["step"] == checkpoint.weights["weight"][0]
    return checkpoint.step


def test_a_run_without_errors_saves_its_last_step(tmp_path):
    train(tmp_path)
    assert saved_step() == 6


def test_a_row_that_cannot_be_used_ends_the_run_with_a_checkpoint_of_the_step_before(tmp_path):
    with pytest.raises(UserError, match="row of step 5 cannot be used"):
        train(tmp_path, stream=Stream(failing=5))
    assert saved_step() == 4


def test_a_first_row_that_cannot_be_used_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="row of step 1"):
        train(tmp_path, stream=Stream(failing=1))
    assert saved_step() is None


def test_an_error_between_steps_saves_the_last_one(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, callbacks=[Failing()])
    assert saved_step() == 3


def test_an_error_inside_a_step_saves_nothing_half_done(tmp_path):
    with pytest.raises(ValueError, match="the device is gone"):
        train(tmp_path, engine=Counting(failing=3))
    assert saved_step() is None


def test_an_update_that_was_skipped_is_not_saved_by_an_error(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, engine=Counting(overflow=True), callbacks=[Failing()])
    assert saved_step() is None


class Deleting(Callback):
    """Has somebody delete a directory after a step."""

    def __init__(self, directory, after):
        self.directory, self.after = directory, after

    def step_end(self, state, record):
        if record.step == self.after:
            shutil.rmtree(self.directory)


@pytest.mark.parametrize("after", [3, 6])
def test_an_output_directory_that_is_deleted_is_noticed_and_written_again(tmp_path, after):
    output = tmp_path / "output"
    state = train(output, callbacks=[MetricsMonitor(), Deleting(output, after)], every=2)
    saved = {3: 2, 6: 4}[after]
    assert state.failures == [
        f"{output / 'metrics.jsonl'} was deleted or moved during the run: steps before {after + 1} are lost",
        f"{output / 'checkpoint' / f'llm-{saved}'} was deleted or moved during the run",
    ]
    assert [record["step"] for record in read_metrics(output / "metrics.jsonl")] == list(range(after + 1, 7))
    assert saved_step() == 6


def test_data_that_fails_on_another_rank_stops_this_one_with_a_checkpoint(tmp_path):
    agreements = iter(["", "data"])

    class Other(Ranks):
        """Agrees with a rank whose data fails after step 2."""

        def agree(self, choice, choices):
            return next(agreements)

        def ranks_where(self, condition):
            assert not condition
            return [5]

    with pytest.raises(RunFailed, match="rank 5 could not make the next batch; see the log of that rank"):
        train(tmp_path, ranks=Other())
    assert saved_step() == 2


def test_under_nohup_a_hangup_is_left_ignored(monkeypatch):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.received
            signal.raise_signal(signal.SIGTERM)
            assert signals.received == "SIGTERM"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
