"""Run mode ``eval`` with ``eval_tasks``: evaluate the weights of ``load_checkpoint`` on public tasks."""

from __future__ import annotations

from pathlib import Path

import lm_eval  # noqa: F401  (a missing extra is reported before anything is computed)

from mindllm.config import RunConfig
from mindllm.evaluate.evaluation import evaluate_on_tasks as evaluate
from mindllm.evaluate.evaluation import failure_lines
from mindllm.evaluate.report import table
from mindllm.launch.heartbeat import heart
from mindllm.process.interrupts import interruptible
from mindllm.run.engines import set_up_execution
from mindllm.run.outcome import RunOutcome
from mindllm.terminal.progress import Progress
from mindllm.train.device import set_up_device
from mindllm.train.job.execution import Execution, Executor
from mindllm.train.job.ranks import SINGLE_RANK

EVALUATION = "evaluation"


def evaluate_on_tasks(config: RunConfig, execution: Execution, progress: Progress) -> RunOutcome:
    """Evaluate with the whole model on each device, regardless of the layout it was trained with.

    Results are written to ``{output_dir}/evaluation``. Replicas share the requests.

    Raises:
        UserError: the devices of a cluster share the model, or a task is unknown.
    """
    if execution.ranks.simulated or execution.executor is Executor.CLUSTER_RANK:
        raise config.error(
            "eval_tasks",
            "requires the whole model on a device, but devices share it here; write use_parallel: false and pass the "
            "checkpoint of all ranks as load_checkpoint",
        )
    ranks = execution.ranks if execution.executor is Executor.REPLICA else SINGLE_RANK
    if ranks is SINGLE_RANK:
        set_up_device(config)
    else:
        set_up_execution(config, execution)
    heart.beat("evaluation on tasks")
    with interruptible():
        outcome = evaluate(config, config.eval_tasks, Path(config.output_dir) / EVALUATION, ranks, progress)
    scores = table(outcome) if ranks.is_first and outcome.results["results"] else ""
    ranks.barrier()
    return RunOutcome(scores=scores, failures=tuple(failure_lines(outcome.failures)))
