"""Run modes ``train``, ``finetune`` and ``eval``: from a configuration to a finished run.

:func:`train` is the story of a training run. Follow it to :class:`mindllm.train.trainer.Trainer` for the loop, and to the engines
in :mod:`mindllm.train.engine` for a step.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig, override_config, render_config, with_model
from mindllm.config.callbacks import CheckpointMonitorConfig, EvalTasksConfig
from mindllm.config.reading.load import RESOLVED
from mindllm.data import Tokenizer
from mindllm.files import atomic_open, size_in_bytes
from mindllm.launch.heartbeat import heart
from mindllm.logs import set_up_logging
from mindllm.run.engines import batch_shard, evaluation_rows, make_engine, set_up_execution
from mindllm.run.outcome import HELD_OUT, RunOutcome
from mindllm.run.proof import NO_PROOF, ProofSummary
from mindllm.run.proof_monitor import ProofMonitor
from mindllm.terminal.json_text import strict
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.batches.datasets import RunData
from mindllm.train.callbacks import make_callbacks
from mindllm.train.callbacks.callback import Callback
from mindllm.train.checkpoint import Checkpoint, CheckpointStore, Peers, load_checkpoint
from mindllm.train.checkpoint.loading import Base
from mindllm.train.checkpoint.names import refuse_existing
from mindllm.train.checkpoint.parts import join_ranks
from mindllm.train.evaluation import EvaluationResult, RowResult
from mindllm.train.job.data_agreement import require_same_data
from mindllm.train.job.execution import Execution, Executor, describe
from mindllm.train.job.output_directory import CHECKPOINTS, claim_output_directory
from mindllm.train.job.ranks import SINGLE_RANK, Ranks
from mindllm.train.job.restart import checkpoint_to_resume, mark_started
from mindllm.train.job.resume import restore, sample_offset
from mindllm.train.optimizers.loss_scale import LossScaler
from mindllm.train.optimizers.schedule import group_learning_rates, learning_rates
from mindllm.train.state import RunState, last_step
from mindllm.train.trainer import Trainer
from mindllm.train.utilization import peak_of
from mindllm.weight_files import (
    Pretrained,
    base_record,
    find_pretrained,
    full_weights,
    has_frozen_weights,
    merged_pretrained,
    write_weights,
)

logger = logging.getLogger(__name__)


def train(config: RunConfig, execution: Execution, progress: Progress, proof: ProofSummary = NO_PROOF) -> RunOutcome:
    """Train from scratch, from ``load_checkpoint``, or resume from a checkpoint.

    Args:
        config: the run.
        execution: which engine, and which rank this process is.
        progress: called with compiled ranks, data that is prepared, and evaluated batches.
        proof: the log line about the proof of the run, and its prediction.

    Raises:
        UserError: the output directory, the data or a checkpoint does not fit the run.
        RunFailed: training failed, or ranks see different files.
    """
    ranks = execution.ranks
    heart.start(config.runner_config.step_timeout)
    # Ranks of other launchers can only exchange numbers over MindSpore's collectives; ours compile faster without them first.
    if execution.connects_first:
        set_up_execution(config, execution)
    peers = claim_output_directory(config, SINGLE_RANK if ranks.simulated else ranks)
    log = set_up_logging(config.output_dir)
    data = RunData(config, batch_shard(config, execution), progress)
    if not ranks.simulated:
        require_same_data(data.dataset, ranks)
    rank_progress = progress if ranks.is_first and not ranks.simulated else unwatched
    evaluator = data.evaluator(evaluation_rows(config, execution), rank_progress) if config.do_eval else None
    store, checkpoint = _open_store(config, peers, ranks)
    if checkpoint is not None:
        data.sample_offset = sample_offset(config, checkpoint)
    rates = _learning_rates(config, data.total_steps)
    if ranks.simulated and not config.runner_config.stop_step:
        # A simulation executes one step.
        step = checkpoint.step if checkpoint is not None else 0
        config = override_config(config, {"runner_config.stop_step": step + 1})
    if checkpoint is not None and checkpoint.step >= last_step(config, data.total_steps):
        logger.info("nothing to do: %s is at step %d, the end of this run", checkpoint.path, checkpoint.step)
        return RunOutcome()
    if config.export_hf.directory:
        refuse_existing(Path(config.export_hf.directory))
    state = _build_state(config, execution, data, checkpoint, progress)
    del checkpoint  # its tensors are in the engine now
    for path in mark_started(config, store, state.step):
        logger.info("moved a checkpoint of a step after %d, where training starts: %s", state.step, path)
    _log_start(state, execution)
    if proof.line:
        logger.info("%s", proof.line)
    callbacks = make_callbacks(config, store, evaluator, ranks, _first_callbacks(config, ranks, proof), rank_progress)
    peak = peak_of(config.context.device_target, ranks.simulated)
    Trainer(state, data.train_stream(), rates[0], callbacks, peak, ranks, rates[1]).run()
    if ranks.is_first and not ranks.simulated:
        export(state, store, data.tokenizer)
    ranks.barrier()
    state.results["log"] = str(log)
    return RunOutcome(
        dict(state.results),
        failures=tuple(state.failures),
        interrupted=state.stop_reason == signal.Signals.SIGINT.name,
    )


def _open_store(config: RunConfig, peers: Peers, ranks: Ranks) -> tuple[CheckpointStore, Checkpoint | None]:
    """Return the checkpoint store of the run, repaired after a crash, and the checkpoint to resume from, if any."""
    store = make_store(config, peers, ranks.simulated)
    store.recover()
    ranks.barrier()
    checkpoint = checkpoint_to_resume(config, store)
    if checkpoint is not None and not ranks.simulated:
        checkpoint.refuse_simulated()
    return store, checkpoint


def _build_state(
    config: RunConfig, execution: Execution, data: RunData, checkpoint: Checkpoint | None, progress: Progress
) -> RunState:
    """Build the engine, load pretrained weights and the checkpoint into it, and return the state before the first step."""
    pretrained = _find_pretrained(config, checkpoint)
    weights = pretrained.run_weights(config) if pretrained is not None else None
    # Weights are read before the device is set up: a missing file is reported in seconds.
    if not execution.connects_first:
        set_up_execution(config, execution)
    if execution.ranks.is_first:
        with atomic_open(f"{config.output_dir}/{RESOLVED}") as file:
            file.write(render_config(config))
    engine = make_engine(config, execution, progress=progress, loaded=weights or ())
    scaler = LossScaler(config.runner_wrapper.scale_sense)
    state = RunState(config, engine, scaler, data.total_steps, data.steps_per_epoch)
    state.base_weights = pretrained.base if pretrained is not None else None
    state.base = base_record(config, pretrained)
    if pretrained is not None and weights is not None:
        engine.load_state(weights)
        logger.info("loaded the weights of %s", pretrained.path)
    if checkpoint is not None:
        restore(state, checkpoint)
    return state


def _find_pretrained(config: RunConfig, checkpoint: Checkpoint | None) -> Pretrained | None:
    """Return the weights to start from. A resumed run only needs those that its checkpoints leave out."""
    base = Base.from_state(checkpoint.state) if checkpoint is not None else None
    if checkpoint is not None and not has_frozen_weights(config.model.config):
        return None
    if not config.load_checkpoint and (base is None or not base.path):
        return None
    return find_pretrained(config, base)


def _first_callbacks(config: RunConfig, ranks: Ranks, proof: ProofSummary) -> list[Callback]:
    """Return callbacks whose figures the metrics include: evaluation on tasks, comparison with the proof."""
    callbacks: list[Callback] = []
    sections = [item for item in config.callbacks if isinstance(item, EvalTasksConfig)]
    if sections and not ranks.simulated:
        from mindllm.evaluate.callback import EvalTasks

        callbacks += [EvalTasks(section) for section in sections]
    if proof.prediction:
        callbacks.append(ProofMonitor(proof.prediction))
    return callbacks


def _learning_rates(
    config: RunConfig, total_steps: int
) -> tuple[Callable[[int], float], Callable[[int], tuple[float, ...]]]:
    """Return the learning rate of a step, and those of its weight groups."""
    assert config.lr_schedule is not None  # checked when the configuration is loaded
    groups = config.grouped_lr_schedule.grouped
    return learning_rates(config.lr_schedule, total_steps), group_learning_rates(groups, total_steps)


def evaluate(config: RunConfig, execution: Execution, progress: Progress) -> RunOutcome:
    """Evaluate the weights of ``load_checkpoint`` on held-out text, or on ``eval_tasks``.

    Raises:
        UserError: ``load_checkpoint`` is missing, or does not fit the model.
    """
    if not config.load_checkpoint:
        raise config.error("load_checkpoint", "run_mode eval requires weights; pass a checkpoint directory")
    heart.start(config.runner_config.step_timeout)
    set_up_logging(config.output_dir)
    if config.eval_tasks:
        from mindllm.run.tasks import evaluate_on_tasks

        return evaluate_on_tasks(config, execution, progress)
    if execution.connects_first:
        set_up_execution(config, execution)
    data = RunData(config, batch_shard(config, execution), progress)
    evaluator = data.evaluator(evaluation_rows(config, execution), progress)
    model, pretrained = merged_pretrained(config)
    if not execution.connects_first:
        set_up_execution(config, execution)
    engine = make_engine(with_model(config, model), execution, False, progress, pretrained)
    engine.load_state(pretrained)
    result = evaluator.run(engine)
    logger.info("%s on the %s split: %s", config.load_checkpoint, config.eval_dataset.split, result.describe())
    if execution.ranks.is_first:
        _write_held_out(config, result)
    return RunOutcome()


def _write_held_out(config: RunConfig, result: EvaluationResult | RowResult) -> None:
    """Write the result as JSON for programs."""
    header = {"checkpoint": config.load_checkpoint, "split": config.eval_dataset.split, "text": result.describe()}
    with atomic_open(f"{config.output_dir}/{HELD_OUT}") as file:
        file.write(json.dumps(strict({**header, **vars(result)}), allow_nan=False) + "\n")


def make_store(config: RunConfig, peers: Peers, simulated: bool = False) -> CheckpointStore:
    """Return the checkpoint store of a run, configured by its ``CheckpointMonitor`` section.

    A simulated rank saves every tensor it has, because no other rank exists to save the replicated ones.
    """
    sections = (item for item in config.callbacks if isinstance(item, CheckpointMonitorConfig))
    section = next(sections, CheckpointMonitorConfig(type="CheckpointMonitor", keep_checkpoint_max=1))
    return CheckpointStore(
        Path(config.output_dir) / CHECKPOINTS,
        keep_checkpoint_max=section.keep_checkpoint_max,
        peers=peers,
        remove_redundancy=section.remove_redundancy and not simulated,
    )


def _log_start(state: RunState, execution: Execution) -> None:
    config = state.config
    if execution.executor is not Executor.REPLICA:
        logger.info("%s", describe(config, execution))
    architecture = config.model.config.architecture
    trained, total = architecture.trained_parameter_count(), architecture.parameter_count()
    logger.info(
        "%s: %s parameters%s, global batch %d x %d tokens, steps %d to %d of %d",
        config.trainer.model_name or config.model.config.type,
        f"{config.model.config.parameter_count():,}",
        f", {trained:,} of them trained ({trained / total:.2%})" if trained < total else "",
        config.global_batch_size,
        config.model.config.seq_length,
        state.step + 1,
        state.last_step,
        state.total_steps,
    )


def export(state: RunState, store: CheckpointStore, tokenizer: Tokenizer | None) -> None:
    """Write the weights as a Hugging Face directory, if section ``export_hf`` asks for it and the run is complete.

    Raises:
        UserError: each rank has a part of the weights, and the last step was not saved.
    """
    section = state.config.export_hf
    if not section.directory or state.step < state.total_steps:
        return
    dtype = section.dtype or state.config.model.config.param_init_type
    directory = write_weights(
        section.directory,
        state.config.model.config.merged,
        _weights_to_export(state, store),
        dtype=dtype,
        max_shard_bytes=size_in_bytes(section.max_shard_size),
        tokenizer=tokenizer,
        chat_template=state.config.chat_template,
    )
    logger.info("exported the weights to %s in %s", directory, dtype)
    state.results["Hugging Face directory"] = str(directory)


def _weights_to_export(state: RunState, store: CheckpointStore) -> Mapping[str, Any]:
    """Return the whole weights: from memory if this process has them, otherwise from the last checkpoint."""
    if state.engine.holds_all:
        parts = (tensors.weights for tensors in state.engine.local_state().values())
        return full_weights(state, join_ranks(parts), "export_hf.directory")
    newest = store.newest()
    checkpoint = load_checkpoint(newest, with_optimizer=False) if newest is not None else None
    if checkpoint is None or checkpoint.step != state.step:
        message = (
            "each rank has a part of the weights, and the last step was not saved; add the callback CheckpointMonitor"
        )
        raise state.config.error("export_hf.directory", message)
    return full_weights(state, checkpoint.weights, "export_hf.directory")
