"""Trackers: what TensorBoard, Weights & Biases and MLflow hold of a run, read by their own readers, also after it was resumed."""

import json
import logging
import math
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.config.callbacks import MlflowConfig, TensorBoardConfig, WandbConfig
from mindllm.train.callbacks.trackers import RUN_IDS, TrackerMonitor
from mindllm.train.state import StepRecord

TINY = "configs/llama2/pretrain_llama2_tiny.yaml"
RECORD = StepRecord(1, 1, 2.0, 0.1, 1.0, False, 1.0, 8, 1.0, 8.0, 8.0, 1.0, 0.0, 0.0)


@pytest.fixture
def state(tmp_path):
    return SimpleNamespace(
        config=load_config(TINY),
        step=0,
        output_dir=tmp_path,
        scores={},
        mtp_loss=None,
        preference={},
        against_proof={},
        health={},
        expert_loads=(),
    )


def watch(section, state, losses):
    """Train from ``state.step`` on: a step for each loss, the last of which was evaluated."""
    monitor = TrackerMonitor(section)
    monitor.begin(state)
    for loss in losses:
        state.step += 1
        state.scores = {"arc_easy/acc": 0.5} if loss is losses[-1] else {}
        monitor.step_end(state, replace(RECORD, step=state.step, loss=loss))
    monitor.close()


def test_tensorboard_reads_what_was_written_and_forgets_what_a_resumed_run_writes_again(state, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    watch(TensorBoardConfig(type="TensorBoard"), state, [3.0, math.nan, 2.5, 2.4])
    state.step = 2  # as from a checkpoint of step 2
    watch(TensorBoardConfig(type="TensorBoard"), state, [2.0, 1.5])
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 3.0), (3, 2.0), (4, 1.5)]
    assert [event.step for event in found.Scalars("arc_easy/acc")] == [4]
    assert {"learning_rate", "global_norm", "step_time_s"} <= set(found.Tags()["scalars"])


def test_steps_between_records_are_left_out_but_for_what_was_evaluated(state, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    place = tmp_path / "elsewhere"
    watch(TensorBoardConfig(type="TensorBoard", log_dir=str(place), collect_freq=2), state, [5.0, 4.0, 3.0])
    found = accumulator.EventAccumulator(str(place)).Reload()
    assert [event.step for event in found.Scalars("loss")] == [2, 3]


def test_mlflow_has_one_run_of_a_run_that_was_resumed(state, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    for losses in ([3.0, 2.0], [1.0]):
        watch(MlflowConfig(type="Mlflow", experiment="tries", name="mine"), state, losses)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("tries").experiment_id])
    history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert (run.info.run_name, run.info.status, history) == ("mine", "FINISHED", [(1, 3.0), (2, 2.0), (3, 1.0)])
    assert load_config(next(tmp_path.glob("mlflow/**/run.yaml"))) == state.config


def records_of(path):
    """The records of a .wandb file: behind 7 bytes a log of LevelDB, in blocks of 32 KiB, with 7 bytes before each piece."""
    content = path.read_bytes()
    place, record = 7, b""
    assert content[:4] == b":W&B"
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # no piece begins there
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack("<4xHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last piece
            yield record
            record = b""


def test_wandb_stays_offline_under_a_name_that_is_kept(state, tmp_path):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for losses in ([3.0, 2.0], [1.0]):
        watch(WandbConfig(type="Wandb"), state, losses)
    wandb.teardown()  # its process may close the file of the last run only after finish() has returned
    identity = json.loads((tmp_path / RUN_IDS).read_text())["Wandb"]
    steps = {}
    for path in sorted((tmp_path / "wandb").glob(f"offline-run-*-{identity}*/*.wandb")):
        for content in records_of(path):
            record = wandb_internal_pb2.Record.FromString(content)
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "loss" in items:
                steps[int(items["_step"])] = json.loads(items["loss"])
    assert steps == {1: 3.0, 2: 2.0, 3: 1.0}


class Full:
    """A tracker that takes no more after a step."""

    def __init__(self):
        self.steps, self.closed = [], False

    def log(self, step, scalars):
        if step == 2:
            raise OSError(28, "No space left on device")
        self.steps.append(step)

    def close(self):
        self.closed = True


def test_a_tracker_that_fails_is_told_once_and_costs_no_step(state, monkeypatch, caplog):
    full = Full()
    monitor = TrackerMonitor(TensorBoardConfig(type="TensorBoard"))
    monitor._open = lambda section, state: full
    monitor.begin(state)
    with caplog.at_level(logging.ERROR):
        for step in (1, 2, 3):
            monitor.step_end(state, replace(RECORD, step=step))
        monitor.close()
    assert full.steps == [1]
    assert [record.message for record in caplog.records] == [
        "callbacks: TensorBoard is disabled for the rest of this run: [Errno 28] No space left on device"
    ]


def test_a_library_that_is_missing_is_named_before_anything_is_trained(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(SystemExit, match="2"):
        run_command(lambda _: TrackerMonitor(TensorBoardConfig(type="TensorBoard")), [])
    assert "pip install 'mindllm[tensorboard]'" in capsys.readouterr().err
