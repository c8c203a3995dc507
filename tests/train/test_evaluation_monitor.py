"""Held-out text is evaluated once before training that starts from weights, at the steps asked for, and at the end."""

import json
from types import SimpleNamespace

import pytest

from mindllm.train.callbacks.monitors import EvaluationMonitor
from mindllm.train.evaluation import EvaluationResult


def steps_evaluated(output, load_checkpoint, first=0, last=5, interval=2):
    evaluator = SimpleNamespace(run=lambda engine: EvaluationResult(1.0, 2.7, None, 10, 2.0))
    config = SimpleNamespace(load_checkpoint=load_checkpoint)
    state = SimpleNamespace(config=config, step=first, output_dir=output, engine=None, results={}, stop_reason="")
    monitor = EvaluationMonitor(evaluator, interval)
    monitor.begin(state)
    for step in range(first + 1, last + 1):
        state.step = step
        monitor.step_end(state, SimpleNamespace(step=step))
    monitor.end(state)
    monitor.close()
    return [json.loads(line)["step"] for line in (output / "evaluation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("load_checkpoint", "expected"), [("", [2, 4, 5]), ("weights", [0, 2, 4, 5])])
def test_each_step_once_also_when_the_run_starts_again(tmp_path, load_checkpoint, expected):
    assert steps_evaluated(tmp_path, load_checkpoint) == expected
    assert steps_evaluated(tmp_path, load_checkpoint) == expected
    assert steps_evaluated(tmp_path, load_checkpoint, first=4) == expected
