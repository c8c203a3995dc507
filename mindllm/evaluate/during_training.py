"""The model of a run, built a second time to be evaluated on tasks while it is trained."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from mindllm.config import RunConfig
from mindllm.config.generation import EvaluationConfig
from mindllm.data import run_tokenizer
from mindllm.evaluate.local_data import OFFLINE
from mindllm.evaluate.progress import LoggedProgress
from mindllm.finetune.transform import build_tuned_model
from mindllm.generate.generator import Generator
from mindllm.models.weights import assign, model_weights
from mindllm.terminal.progress import unwatched
from mindllm.train.job.ranks import Ranks

if TYPE_CHECKING:
    from mindllm.evaluate.run import Outcome


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
        tokenizer = run_tokenizer(config)
        self.generator = Generator(
            self.model, config.model.config.merged, tokenizer, device_target=device, shares_prefixes=True
        )

    def evaluate(self, weights: Mapping[str, ArrayLike], directory: Path) -> Outcome:
        """The outcome with ``weights``; processes find each other's answers in ``directory``."""
        from mindllm.evaluate.answers import Answers
        from mindllm.evaluate.model import EvaluatedModel
        from mindllm.evaluate.run import evaluate_tasks

        assign(model_weights(self.model), weights)
        self.generator.forget()
        answers = Answers(directory if self.ranks.count > 1 else None, self.ranks)
        model = EvaluatedModel(
            self.generator, self.options.batch_size, answers, LoggedProgress() if self.ranks.is_first else unwatched
        )
        try:
            return evaluate_tasks(model, self.tasks, self.options, self.manager)
        finally:
            answers.close()
