"""Evaluates on held-out text while training: before it if it starts from trained weights, every so many steps, at the end."""

from __future__ import annotations

import logging
from dataclasses import asdict

from mindllm.train.callbacks.callback import Callback
from mindllm.train.evaluation import Evaluator
from mindllm.train.metrics_file import MetricsFile
from mindllm.train.state import RunState, StepRecord

EVALUATION_NAME = "evaluation.jsonl"
logger = logging.getLogger(__name__)


class EvaluationMonitor(Callback):
    """Logs held-out loss and, where it ``writes``, appends it to ``{output_dir}/evaluation.jsonl``."""

    def __init__(self, evaluator: Evaluator, eval_step_interval: int, writes: bool = True) -> None:
        self.evaluator = evaluator
        self.writes = writes
        self.eval_step_interval = eval_step_interval
        self.file: MetricsFile | None = None
        self.evaluated_step = -1

    def begin(self, state: RunState) -> None:
        starts_from_weights = bool(state.config.load_checkpoint) and state.step == 0
        if self.writes:
            self.file = MetricsFile(state.output_dir / EVALUATION_NAME)
            self.file.rewind(state.step - starts_from_weights)
        if starts_from_weights:
            self.evaluate(state)
            state.results["held-out before"] = state.results["held-out"]

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if record.step % self.eval_step_interval == 0:
            self.evaluate(state)

    def end(self, state: RunState) -> None:
        if state.step > self.evaluated_step and not state.stop_reason:
            self.evaluate(state)

    def evaluate(self, state: RunState) -> None:
        result = self.evaluator.run(state.engine)
        if self.file is not None:
            self.file.append({"step": state.step, **asdict(result)})
        self.evaluated_step = state.step
        state.results["held-out"] = result.describe()
        logger.info("step %d: held-out %s", state.step, result.describe())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
