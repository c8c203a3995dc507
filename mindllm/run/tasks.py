"""Run mode ``eval`` with ``eval_tasks``: the weights of ``load_checkpoint`` on public tasks."""

from __future__ import annotations

from pathlib import Path

import lm_eval  # noqa: F401  (what is not installed is told before anything is done)

from mindllm.config import RunConfig
from mindllm.evaluate.evaluation import evaluate_on_tasks as evaluate
from mindllm.evaluate.evaluation import failure_lines
from mindllm.evaluate.report import table
from mindllm.launch.heartbeat import heart
from mindllm.process.interrupts import interruptible
from mindllm.run.engines import set_up_execution
from mindllm.run.outcome import Ended
from mindllm.terminal.progress import Progress
from mindllm.train.device import set_up_device
from mindllm.train.job.execution import Execution, Executor
from mindllm.train.job.ranks import ALONE

EVALUATION = "evaluation"


def evaluate_on_tasks(config: RunConfig, execution: Execution, progress: Progress) -> Ended:
    """Evaluates with the whole model on each device, whatever the layout it was trained under.

    Results go below ``{output_dir}/evaluation``. Processes that are replicas share the requests.

    Raises:
        UserError: devices of a cluster share the model, or a task is unknown.
    """
    if execution.ranks.simulated or execution.executor is Executor.CLUSTER_RANK:
        raise config.error(
            "eval_tasks",
            "are evaluated with the whole model on a device, not by devices that share it; write use_parallel: false and name "
            "the checkpoint of all ranks in load_checkpoint",
        )
    ranks = execution.ranks if execution.executor is Executor.REPLICA else ALONE
    if ranks is ALONE:
        set_up_device(config)
    else:
        set_up_execution(config, execution)
    heart.beat("evaluation on tasks")
    with interruptible():
        outcome = evaluate(config, config.eval_tasks, Path(config.output_dir) / EVALUATION, ranks, progress)
    scores = table(outcome) if ranks.is_first and outcome.results["results"] else ""
    ranks.meet()
    return Ended(scores=scores, failures=tuple(failure_lines(outcome.failures)))
