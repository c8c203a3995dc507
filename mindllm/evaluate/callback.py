"""Scores on public tasks while training: every so many steps and at the last.

The model of the run is built a second time to be evaluated on tasks while it is trained.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from mindllm.config import RunConfig
from mindllm.config.callbacks import EvalTasksConfig
from mindllm.config.generation import EvaluationConfig
from mindllm.data import run_tokenizer
from mindllm.evaluate.local_data import OFFLINE
from mindllm.evaluate.model import LoggedProgress
from mindllm.finetune.transform import build_tuned_model
from mindllm.generate.generator import Generator
from mindllm.models.weights import assign, model_weights
from mindllm.terminal.progress import unwatched
from mindllm.train.callbacks.callback import Callback
from mindllm.train.checkpoint.parts import join_ranks
from mindllm.train.job.ranks import Ranks
from mindllm.train.metrics_file import MetricsFile
from mindllm.train.state import RunState, StepRecord
from mindllm.weight_files import full_weights

if TYPE_CHECKING:
    from mindllm.evaluate.run import Outcome

SCORES_NAME = "task_scores.jsonl"
logger = logging.getLogger(__name__)


class TasksWhileTraining:
    """Evaluates whatever weights it is given on the same tasks; what was compiled is kept.

    Raises UserError for a task that is unknown, before the training begins.
    """

    def __init__(self, config: RunConfig, tasks: Sequence[str], options: EvaluationConfig, ranks: Ranks) -> None:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
        from mindllm.evaluate.run import find_tasks

        self.tasks = tasks
        self.options = options
        self.ranks = ranks
        self.manager = find_tasks(tasks, options)
        device = config.context.device_target
        self.model = build_tuned_model(config.model.config.merged, device)
        self._used = False  # by a compiled graph
        tokenizer = run_tokenizer(config)
        self.generator = Generator(
            self.model,
            config.model.config.merged,
            tokenizer,
            device_target=device,
            shares_prefixes=True,
            chat_template=config.chat_template,
        )

    def evaluate(self, weights: Mapping[str, ArrayLike], directory: Path) -> Outcome:
        """The outcome with ``weights``; processes find each other's answers in ``directory``."""
        from mindllm.evaluate.answers import Answers
        from mindllm.evaluate.model import EvaluatedModel
        from mindllm.evaluate.run import evaluate_tasks

        assign(model_weights(self.model), weights, in_place=self._used)
        self._used = True
        self.generator.forget()
        answers = Answers(directory if self.ranks.count > 1 else None, self.ranks)
        model = EvaluatedModel(
            self.generator, self.options.batch_size, answers, LoggedProgress() if self.ranks.is_first else unwatched
        )
        try:
            return evaluate_tasks(model, self.tasks, self.options, self.manager)
        finally:
            answers.close()


class EvalTasks(Callback):
    """Logs scores, leaves them in ``state.scores`` for who writes metrics, and appends them to ``task_scores.jsonl``.

    The model is built a second time, whole and on one device, and takes the newest weights before each evaluation: whatever
    executes the training, and as much memory as the weights need. Processes share the requests.
    """

    def __init__(self, section: EvalTasksConfig) -> None:
        self.section = section
        self.file: MetricsFile | None = None
        self.tasks: TasksWhileTraining | None = None

    def begin(self, state: RunState) -> None:
        if not state.engine.holds_all:
            raise state.config.error("callbacks", "EvalTasks needs processes that hold the whole model; leave it out")
        options = EvaluationConfig(**{name: getattr(self.section, name) for name in EvaluationConfig.model_fields})
        self.tasks = TasksWhileTraining(state.config, self.section.tasks, options, state.engine.ranks)
        if state.engine.ranks.is_first:
            self.file = MetricsFile(state.output_dir / SCORES_NAME)
            self.file.rewind(state.step)

    def step_begin(self, state: RunState) -> None:
        state.scores.clear()

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if record.step % self.section.eval_steps == 0 or record.step == state.last_step:
            self.evaluate(state)

    def evaluate(self, state: RunState) -> None:
        assert self.tasks is not None
        with ExitStack() as stack:
            directory = state.output_dir / f".task_answers_{state.step}"
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            trained = join_ranks(tensors.weights for tensors in state.engine.local_state().values())
            outcome = self.tasks.evaluate(full_weights(state, trained, "callbacks"), directory)
            state.engine.ranks.barrier()  # before the directory goes
        scores = {f"{task}/{name}": value for task, found in outcome.scores().items() for name, value in found.items()}
        state.scores.update(scores)
        if self.file is not None:
            self.file.append({"step": state.step, "scores": scores, "failures": outcome.failures})
        for name, why in outcome.failures.items():
            message = f"step {state.step}: task {name} failed: {why}"
            state.failures.append(message)
            logger.error("%s", message)
        if scores:
            said = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
            state.results["tasks"] = said
            logger.info("step %d: %s", state.step, said)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
