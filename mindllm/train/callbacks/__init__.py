"""The callbacks of a run, made from its configuration in the order in which they are told of a step."""

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
from mindllm.train.callbacks.checkpoint import CheckpointMonitor
from mindllm.train.callbacks.evaluation import EvaluationMonitor
from mindllm.train.callbacks.figures import ExpertLoadMonitor, PredictionLossMonitor, PreferenceMonitor
from mindllm.train.callbacks.health import HealthMonitor
from mindllm.train.callbacks.metrics import MetricsMonitor, SummaryMonitor
from mindllm.train.callbacks.monitors import FirstStep, LossMonitor, NaNMonitor, SpikeMonitor
from mindllm.train.callbacks.profiler import ProfileMonitor
from mindllm.train.callbacks.simulation import SimulatedCheckpoints, SimulationMonitor
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
    """Those of the section ``callbacks`` in its order, the checkpoint last so that what it announces is whole.

    ``first``: made by who knows them, EvalTasks; they are told of a step before those that write what is known of it.
    ``progress`` is called while the first step compiles.

    In a simulation those that show or write what was computed are left out.
    """
    ours = [item for item in config.callbacks if not isinstance(item, EvalTasksConfig)]
    sections = [item for item in ours if not ranks.simulated or isinstance(item, CheckpointMonitorConfig)]
    made = [*first, *(_make(item, store, ranks.simulated) for item in sections)]
    if ranks.simulated:
        made.append(SimulationMonitor())
    if evaluator is not None:
        made.append(EvaluationMonitor(evaluator, config.eval_step_interval, writes=ranks.is_first))
    if config.profile and (config.profile_rank_ids is None or ranks.rank in config.profile_rank_ids):
        made.append(ProfileMonitor(config, ranks.rank))
    if not ranks.simulated:
        made.insert(0, FirstStep(progress))
        if config.runner_wrapper.skip_spikes is not None:
            made.append(SpikeMonitor())
        if config.model.config.expert_num > 1:
            made.insert(0, ExpertLoadMonitor(_steps_between_lines(config)))
        if config.monitor_config.watched():
            made.insert(0, HealthMonitor(logs=ranks.is_first))
        if config.model.config.num_nextn_predict_layers:
            made.insert(0, PredictionLossMonitor(_steps_between_lines(config)))
        if config.is_preference_tuning:
            made.insert(0, PreferenceMonitor(_steps_between_lines(config)))
    made = [callback for callback in made if ranks.is_first or not callback.first_rank_only]
    return sorted(made, key=lambda callback: isinstance(callback, CheckpointMonitor))


def _steps_between_lines(config: RunConfig) -> int:
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
            monitor = SimulatedCheckpoints if simulated else CheckpointMonitor
            return monitor(store, item.save_checkpoint_steps, item.async_save)
        case NaNMonitorConfig():
            return NaNMonitor()
    raise AssertionError(f"no callback for {item!r}")
