"""Scores while training: when they are computed, where they go, and that a failed task is not forgotten."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")

from mindllm.config.callbacks import EvalTasksConfig
from mindllm.evaluate import callback
from mindllm.evaluate.run import Outcome
from mindllm.train.callbacks.metrics import scalar_event, scalars_of
from mindllm.train.job.ranks import SINGLE_RANK
from mindllm.train.state import StepRecord


class Tasks:
    def __init__(self, config, tasks, options, ranks):
        self.options = options

    def evaluate(self, weights, directory):
        outcome = Outcome(failures={"gone": "no data"})
        outcome.results["results"] = {"arc_easy": {"acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 4}}
        return outcome


@pytest.fixture
def state(tmp_path):
    engine = SimpleNamespace(holds_all=True, local_state=dict, ranks=SINGLE_RANK)
    return SimpleNamespace(
        engine=engine,
        base=None,
        config=None,
        step=0,
        output_dir=tmp_path,
        scores={},
        results={},
        failures=[],
        last_step=3,
    )


def record(step):
    return StepRecord(step, 1, 2.0, 0.1, 1.0, False, 1.0, 8, 1.0, 8.0, 8.0, 1.0, 0.0, 0.0)


def test_scores_of_a_step_are_there_for_who_writes_it_and_gone_at_the_next(monkeypatch, state):
    monkeypatch.setattr(callback, "TasksWhileTraining", Tasks)
    monitor = callback.EvalTasks(EvalTasksConfig(type="EvalTasks", tasks=("arc_easy", "gone"), eval_steps=2, limit=7))
    monitor.begin(state)
    assert monitor.tasks.options.limit == 7
    for step in (1, 2, 3):
        monitor.step_begin(state)
        state.step = step
        monitor.step_end(state, record(step))
        assert state.scores == ({} if step == 1 else {"arc_easy/acc": 0.5})
    monitor.close()
    lines = [json.loads(line) for line in (state.output_dir / "task_scores.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3]
    assert lines[0]["scores"] == {"arc_easy/acc": 0.5}
    assert state.failures == [f"step {step}: task gone failed: no data" for step in (2, 3)]
    assert state.results["tasks"] == "arc_easy/acc 0.5000"


def test_a_summary_has_the_scores(state):
    state.scores = {"arc_easy/acc": 0.5, "gone": float("nan")}
    state.mtp_loss, state.preference, state.against_proof, state.expert_loads, state.health = None, {}, {}, (), {}
    event = scalar_event(2, scalars_of(state, record(2)))
    shown = {value.tag: value.scalar_value for value in event.summary.value}
    assert (shown["arc_easy/acc"], shown["loss"], "gone" in shown) == (0.5, 2.0, False)
