"""Callbacks of a run, built from its configuration in the order in which they are notified."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.config import RunConfig
from mindllm.config.callbacks import (
    CheckpointMonitorConfig,
    EvalTasksConfig,
    LossMonitorConfig,
    MetricsMonitorConfig,
    MlflowConfig,
    NaNMonitorConfig,
    SummaryMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.callbacks.callback import Callback
from mindllm.train.callbacks.checkpoint import CheckpointMonitor, SimulatedCheckpointMonitor
from mindllm.train.callbacks.figures import ExpertLoadMonitor, HealthMonitor, MtpLossMonitor, PreferenceMonitor
from mindllm.train.callbacks.metrics import MetricsMonitor, SummaryMonitor
from mindllm.train.callbacks.monitors import (
    EvaluationMonitor,
    FirstStep,
    LossMonitor,
    NaNMonitor,
    SimulationMonitor,
    SpikeMonitor,
)
from mindllm.train.callbacks.profiler import ProfileMonitor
from mindllm.train.callbacks.trackers import TrackerMonitor
from mindllm.train.checkpoint import CheckpointStore
from mindllm.train.evaluation import Evaluator
from mindllm.train.job.ranks import SINGLE_RANK, Ranks


def make_callbacks(
    config: RunConfig,
    store: CheckpointStore,
    evaluator: Evaluator | None,
    ranks: Ranks = SINGLE_RANK,
    first: Sequence[Callback] = (),
    progress: Progress = unwatched,
) -> list[Callback]:
    """Return the callbacks of section ``callbacks`` in its order, and those that other sections imply.

    Callbacks that compute figures come first, so that those that write metrics see them. Checkpoints come last. A simulation has
    no callbacks that print or write computed values.

    Args:
        config: the run.
        store: where checkpoints are saved.
        evaluator: evaluates held-out text; None without ``do_eval``.
        ranks: the ranks of the run.
        first: further callbacks that compute figures.
        progress: called when the first step starts and ends compiling.
    """
    sections = [item for item in config.callbacks if not isinstance(item, EvalTasksConfig)]
    sections = [item for item in sections if not ranks.simulated or isinstance(item, CheckpointMonitorConfig)]
    callbacks = [*first, *(_make(item, store, ranks.simulated) for item in sections)]
    if ranks.simulated:
        callbacks.append(SimulationMonitor())
    if evaluator is not None:
        callbacks.append(EvaluationMonitor(evaluator, config.eval_step_interval, writes=ranks.is_first))
    if config.profile and (config.profile_rank_ids is None or ranks.rank in config.profile_rank_ids):
        callbacks.append(ProfileMonitor(config, ranks.rank))
    if not ranks.simulated:
        callbacks.insert(0, FirstStep(progress))
        if config.runner_wrapper.skip_spikes is not None:
            callbacks.append(SpikeMonitor())
        if config.model.config.expert_num > 1:
            callbacks.insert(0, ExpertLoadMonitor(_log_interval(config)))
        if config.monitor_config.watched():
            callbacks.insert(0, HealthMonitor(logs=ranks.is_first))
        if config.model.config.num_nextn_predict_layers:
            callbacks.insert(0, MtpLossMonitor(_log_interval(config)))
        if config.is_preference_tuning:
            callbacks.insert(0, PreferenceMonitor(_log_interval(config)))
    callbacks = [callback for callback in callbacks if ranks.is_first or not callback.first_rank_only]
    return sorted(callbacks, key=lambda callback: isinstance(callback, CheckpointMonitor))


def _log_interval(config: RunConfig) -> int:
    return next((item.per_print_times for item in config.callbacks if isinstance(item, LossMonitorConfig)), 1)


def _make(item, store: CheckpointStore, simulated: bool) -> Callback:
    match item:
        case LossMonitorConfig():
            return LossMonitor(item.per_print_times)
        case MetricsMonitorConfig():
            return MetricsMonitor(item.expert_load_steps)
        case SummaryMonitorConfig():
            return SummaryMonitor(item.summary_dir, item.collect_freq)
        case TensorBoardConfig() | WandbConfig() | MlflowConfig():
            return TrackerMonitor(item)
        case CheckpointMonitorConfig():
            monitor = SimulatedCheckpointMonitor if simulated else CheckpointMonitor
            return monitor(store, item.save_checkpoint_steps, item.async_save)
        case NaNMonitorConfig():
            return NaNMonitor()
    raise AssertionError(f"no callback for {item!r}")
