"""Selection of the engine that executes a run, and setup of its device."""

from __future__ import annotations

from collections.abc import Collection

from mindllm.config import RunConfig
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.device import connect, select_device
from mindllm.train.engine import Engine
from mindllm.train.engine.engine import evaluation_config
from mindllm.train.job.execution import Execution, Executor
from mindllm.train.job.ranks import FULL_BATCH, BatchShard


def batch_shard(config: RunConfig, execution: Execution) -> BatchShard:
    """Return the rows of every global batch that this process reads."""
    if execution.executor is Executor.LOCKSTEP:
        return FULL_BATCH
    if execution.executor is Executor.REPLICA:
        return FULL_BATCH if execution.ranks.simulated else BatchShard(execution.ranks.rank, execution.ranks.count)
    from mindllm.train.engine import cluster_rank

    return cluster_rank.batch_shard(config, execution.ranks.rank)


def evaluation_rows(config: RunConfig, execution: Execution) -> int:
    """Return the samples of a global evaluation batch. Devices that share the model evaluate batches as they train on them."""
    if execution.executor is Executor.REPLICA:
        samples = config.eval_dataset.batch_size or config.runner_config.batch_size
        return samples * (1 if execution.ranks.simulated else execution.ranks.count)
    return evaluation_config(config).global_batch_size


def set_up_execution(config: RunConfig, execution: Execution) -> None:
    """Select the device of this process and connect it to the other ranks."""
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
    """Build the engine of a run. Graphs of sharded models are compiled here, other graphs in the first step.

    Args:
        config: the run.
        execution: which engine, and which rank this process is.
        training: also build the training step.
        progress: called with the number of compiled ranks.
        loaded: names of weights that are loaded immediately afterwards and need not be initialized.
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
