"""A job that is started again goes on from its own checkpoints, whatever its options say; another job does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mindllm.config import load_config, override_config
from mindllm.launch.job import JOB
from mindllm.train.checkpoint import CheckpointStore, RankTensors
from mindllm.train.job.restart import checkpoint_to_resume, has_started, mark_started

TINY = Path(__file__).parents[2] / "configs" / "llama2" / "pretrain_llama2_tiny.yaml"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(JOB, "this job")
    return CheckpointStore(tmp_path / "out" / "checkpoint")


def config(store, resume_training=False, overwrite=False):
    changes = {"output_dir": str(store.directory.parent), "resume_training": resume_training, "overwrite": overwrite}
    return override_config(load_config(TINY), changes)


def save(store, step):
    return store.save(step, {0: RankTensors({"w": np.full(2, step, np.float32)}, {})}, {})


def resumed_step(store, **options):
    checkpoint = checkpoint_to_resume(config(store, **options), store)
    return None if checkpoint is None else checkpoint.step


def test_a_job_that_has_not_begun_does_what_its_options_say(store):
    path = save(store, 4)
    save(store, 8)
    assert resumed_step(store) is None
    assert resumed_step(store, resume_training="auto") == 8
    assert resumed_step(store, resume_training=str(path)) == 4


def test_a_job_that_has_begun_anew_goes_on_from_what_it_has_saved_itself(store):
    save(store, 100)  # of an earlier run
    mark_started(config(store, overwrite=True), store, 0)
    assert has_started(config(store))
    assert resumed_step(store, overwrite=True) is None
    save(store, 4)
    assert resumed_step(store, overwrite=True) == 4


def test_a_job_that_has_gone_back_to_an_older_checkpoint_is_not_taken_to_a_newer_one(store):
    path = save(store, 4)
    save(store, 8)
    mark_started(config(store), store, 4)
    assert resumed_step(store, resume_training=str(path)) == 4
    save(store, 5)
    assert resumed_step(store, resume_training=str(path)) == 5


def test_another_job_has_not_begun(store, monkeypatch):
    mark_started(config(store), store, 0)
    monkeypatch.setenv(JOB, "another job")
    assert not has_started(config(store))
    monkeypatch.delenv(JOB)
    assert not has_started(config(store))
    save(store, 4)
    assert resumed_step(store) is None


def test_without_a_launcher_nothing_is_written(store, monkeypatch):
    monkeypatch.delenv(JOB)
    mark_started(config(store), store, 0)
    assert not store.directory.parent.exists()
