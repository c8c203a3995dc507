"""The output directory of a run, claimed before anything is written there: by one run, seen by all its ranks, empty or meant."""

from __future__ import annotations

from pathlib import Path

from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.process.exit_hooks import when_leaving
from mindllm.train.checkpoint import CheckpointStore, Peers
from mindllm.train.job.ranks import Ranks
from mindllm.train.job.rendezvous import call_roll
from mindllm.train.job.restart import has_begun
from mindllm.train.job.run_lock import RunLock
from mindllm.train.metrics_file import METRICS_NAME, read_metrics

CHECKPOINTS = "checkpoint"
ROLL_TIMEOUT_SECONDS = 600.0


def claim_output_directory(config: RunConfig, ranks: Ranks, timeout: float = ROLL_TIMEOUT_SECONDS) -> Peers:
    """Claims ``output_dir`` for this run until the process ends; returns who writes checkpoints there together.

    Raises:
        UserError: another run is training there, or has trained there and nothing says what becomes of its results.
        RunFailed: not all ranks see the same directory.
    """
    directory = Path(config.output_dir)
    if ranks.is_first:
        lock = RunLock(directory)
        lock.acquire()
        when_leaving(lock.release)
        refuse_results(config)
    if ranks.count == 1:
        return Peers()
    name = call_roll(directory, ranks.rank, ranks.count, timeout)
    return Peers(ranks.rank, ranks.count, name, lambda answer: ranks.sum([float(not answer)]) == [0.0])


def refuse_results(config: RunConfig) -> None:
    """Refuse a directory with results of an earlier run: a new one would cut its metrics off, and in time delete its checkpoints.

    Raises:
        UserError: they are there, and nothing says what becomes of them.
    """
    directory = Path(config.output_dir)
    if config.resume_training is not False or config.overwrite or has_begun(config):
        return
    newest = CheckpointStore(directory / CHECKPOINTS).newest()
    metrics = directory / METRICS_NAME
    steps = len(read_metrics(metrics)) if metrics.is_file() else 0
    if newest is None and not steps:
        return
    found = [f"{steps} steps in {METRICS_NAME}"] if steps else []
    found += [f"checkpoint {newest.name}"] if newest else []
    raise UserError(
        f"{directory} holds a run already ({' and '.join(found)}); go on with --resume_training, give another --output_dir, "
        "or write --overwrite, which begins anew: the metrics are lost, the checkpoints give way to new ones"
    )
