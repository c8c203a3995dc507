"""Which engine executes a run, and the device it needs."""

from __future__ import annotations

from collections.abc import Collection

from mindllm.config import RunConfig
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.device import connect, select_device
from mindllm.train.engine import Engine
from mindllm.train.engine.engine import evaluation_config
from mindllm.train.job.execution import Execution, Executor
from mindllm.train.job.ranks import FULL_BATCH, BatchShard


def share_of(config: RunConfig, execution: Execution) -> BatchShard:
    """The rows of every batch that this process reads."""
    if execution.executor is Executor.LOCKSTEP:
        return FULL_BATCH
    if execution.executor is Executor.REPLICA:
        return FULL_BATCH if execution.ranks.simulated else BatchShard(execution.ranks.rank, execution.ranks.count)
    from mindllm.train.engine import cluster_rank

    return cluster_rank.share_of(config, execution.ranks.rank)


def evaluation_rows(config: RunConfig, execution: Execution) -> int:
    """Samples of a whole batch that is evaluated: where devices share the model, it goes through like one that is trained on."""
    if execution.executor is Executor.REPLICA:
        samples = config.eval_dataset.batch_size or config.runner_config.batch_size
        return samples * (1 if execution.ranks.simulated else execution.ranks.count)
    return evaluation_config(config).global_batch_size


def set_up_execution(config: RunConfig, execution: Execution) -> None:
    """Selects the device of this process and connects it with the other ranks."""
    select_device(config, execution.ranks)
    if execution.ranks.simulated:
        from mindllm.compiled.simulation.simulated_process import prepare_simulation

        prepare_simulation()
    connect(execution.ranks)


def make_engine(
    config: RunConfig,
    execution: Execution,
    training: bool = True,
    progress: Progress = unwatched,
    loaded: Collection[str] = (),
) -> Engine:
    """Builds what executes the run; graphs of sharded models are compiled now, others with the first step.

    ``progress`` is told of ranks that are compiled. ``loaded``: weights that are put into it at once, which need not be drawn.
    """
    if execution.executor is Executor.REPLICA:
        from mindllm.parallel.context import refuse_mean_gradients
        from mindllm.train.engine.replica import ReplicaEngine

        if execution.ranks.count > 1:
            refuse_mean_gradients(config)
        return ReplicaEngine(config, training, execution.ranks, loaded)
    if execution.executor is Executor.CLUSTER_RANK:
        from mindllm.train.engine.cluster_rank import ClusterRankEngine

        return ClusterRankEngine(config, execution.ranks, training)
    from mindllm.compiled.execute.engine import LockstepEngine

    return LockstepEngine(config, training, progress)
