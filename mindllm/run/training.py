"""The run modes ``train``, ``finetune`` and ``eval``: from a configuration to a finished run and its report."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig, render_config, with_model
from mindllm.config.callbacks import CheckpointMonitorConfig, EvalTasksConfig
from mindllm.config.reading.load import RESOLVED
from mindllm.data import Tokenizer
from mindllm.files import atomic_open, size_in_bytes
from mindllm.launch.heartbeat import heart
from mindllm.logs import set_up_logging
from mindllm.run.engines import evaluation_rows, make_engine, set_up_execution, share_of
from mindllm.run.outcome import HELD_OUT, Ended
from mindllm.run.proof_monitor import ProofMonitor
from mindllm.run.proved import NOTHING_FOUND, Found
from mindllm.run.simulated import one_step_unless_said
from mindllm.terminal.json_text import strict
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.batches.datasets import RunData
from mindllm.train.callbacks import make_callbacks
from mindllm.train.callbacks.callback import Callback
from mindllm.train.checkpoint import Checkpoint, CheckpointStore, Peers, load_checkpoint
from mindllm.train.checkpoint.loading import Base
from mindllm.train.checkpoint.names import refuse_existing
from mindllm.train.checkpoint.parts import joined
from mindllm.train.evaluation import EvaluationResult, RowResult
from mindllm.train.job.data_agreement import refuse_different_data
from mindllm.train.job.execution import Execution, Executor, describe
from mindllm.train.job.output_directory import CHECKPOINTS, claim_output_directory
from mindllm.train.job.ranks import ALONE, Ranks
from mindllm.train.job.restart import begin, checkpoint_to_resume
from mindllm.train.job.resume import restore, sample_offset
from mindllm.train.optimizers.loss_scale import LossScaler
from mindllm.train.optimizers.schedule import group_learning_rates, learning_rates
from mindllm.train.state import RunState, last_step
from mindllm.train.trainer import Trainer
from mindllm.train.utilisation import peak_of
from mindllm.weight_files.adapter import leaves_weights_out
from mindllm.weight_files.hugging_face_export import export_hugging_face
from mindllm.weight_files.pretrained import Pretrained, base_record, find_pretrained, merged_pretrained
from mindllm.weight_files.whole_weights import whole_weights

logger = logging.getLogger(__name__)


def train(config: RunConfig, execution: Execution, progress: Progress, proved: Found = NOTHING_FOUND) -> Ended:
    """Trains from scratch, from ``load_checkpoint``, or on from a checkpoint.

    ``proved``: what is known of the proof of the run.
    """
    ranks = execution.ranks
    heart.start(config.runner_config.step_timeout)
    if execution.connects_first:
        set_up_execution(config, execution)
    peers = claim_output_directory(config, ALONE if ranks.simulated else ranks)
    log = set_up_logging(config.output_dir)
    data = RunData(config, share_of(config, execution), progress)
    if not ranks.simulated:
        refuse_different_data(data.dataset, ranks)
    shown = progress if ranks.is_first and not ranks.simulated else unwatched
    evaluator = data.evaluator(evaluation_rows(config, execution), shown) if config.do_eval else None
    store = make_store(config, peers, ranks.simulated)
    store.recover()
    ranks.meet()
    checkpoint = checkpoint_to_resume(config, store)
    if checkpoint is not None and not ranks.simulated:
        checkpoint.refuse_simulated()
    if checkpoint is not None:
        data.sample_offset = sample_offset(config, checkpoint)
    total_steps = data.total_steps
    assert config.lr_schedule is not None  # or loading had refused it
    rates = learning_rates(config.lr_schedule, total_steps)
    group_rates = group_learning_rates(config.grouped_lr_schedule.grouped, total_steps)
    if ranks.simulated:
        config = one_step_unless_said(config, checkpoint.step if checkpoint is not None else 0)
    if checkpoint is not None and checkpoint.step >= last_step(config, total_steps):
        logger.info("nothing to do: %s is at step %d, where this run ends", checkpoint.path, checkpoint.step)
        return Ended()
    if config.export_hf.directory:
        refuse_existing(Path(config.export_hf.directory))
    pretrained = _pretrained(config, checkpoint)
    given = pretrained.of(config) if pretrained is not None else None
    if not execution.connects_first:
        set_up_execution(config, execution)
    if ranks.is_first:
        with atomic_open(f"{config.output_dir}/{RESOLVED}") as file:
            file.write(render_config(config))
    engine = make_engine(config, execution, progress=progress, loaded=given or ())
    state = RunState(config, engine, LossScaler(config.runner_wrapper.scale_sense), total_steps, data.steps_per_epoch)
    state.base_weights = pretrained.base if pretrained is not None else None
    state.base = base_record(config, pretrained)
    if given is not None:
        engine.load_state(given)
        logger.info("weights of %s", pretrained.path if pretrained else "")
    if checkpoint is not None:
        restore(state, checkpoint)
    del checkpoint, given
    for path in begin(config, store, state.step):
        logger.info("a checkpoint after step %d, where training starts, was set aside: %s", state.step, path)
    _announce(state, execution)
    if proved.line:
        logger.info("%s", proved.line)
    first = [*_evaluations(config, ranks), *_monitors(proved)]
    callbacks = make_callbacks(config, store, evaluator, ranks, first, shown)
    peak = peak_of(config.context.device_target, ranks.simulated)
    Trainer(state, data.train_stream(), rates, callbacks, peak, ranks, group_rates).run()
    if ranks.is_first and not ranks.simulated:
        export(state, store, data.tokenizer)
    ranks.meet()
    state.results["log"] = str(log)
    return Ended(
        dict(state.results),
        failures=tuple(state.failures),
        interrupted=state.stop_reason == signal.Signals.SIGINT.name,
    )


def _pretrained(config: RunConfig, checkpoint: Checkpoint | None) -> Pretrained | None:
    """What the run starts from. One that goes on needs the weights alone that its checkpoints leave out."""
    base = Base.of(checkpoint.state) if checkpoint is not None else None
    if checkpoint is not None and not leaves_weights_out(config.model.config):
        return None
    if not config.load_checkpoint and (base is None or not base.path):
        return None
    return find_pretrained(config, base)


def _evaluations(config: RunConfig, ranks: Ranks) -> list[Callback]:
    """The callbacks that evaluate on tasks; in a simulation nothing is computed that could be."""
    sections = [item for item in config.callbacks if isinstance(item, EvalTasksConfig)]
    if not sections or ranks.simulated:
        return []
    from mindllm.evaluate.callback import EvalTasks

    return [EvalTasks(section) for section in sections]


def _monitors(proved: Found) -> list[Callback]:
    """What holds steps against the proof of the run, if it predicts any."""
    return [ProofMonitor(proved.predicted)] if proved.predicted else []


def evaluate(config: RunConfig, execution: Execution, progress: Progress) -> Ended:
    """Evaluates the weights of ``load_checkpoint``, on held-out text or on ``eval_tasks``."""
    if not config.load_checkpoint:
        raise config.error("load_checkpoint", "run_mode eval needs weights; give a checkpoint directory")
    heart.start(config.runner_config.step_timeout)
    set_up_logging(config.output_dir)
    if config.eval_tasks:
        from mindllm.run.tasks import evaluate_on_tasks

        return evaluate_on_tasks(config, execution, progress)
    if execution.connects_first:
        set_up_execution(config, execution)
    data = RunData(config, share_of(config, execution), progress)
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
    return Ended()


def _write_held_out(config: RunConfig, result: EvaluationResult | RowResult) -> None:
    """Keeps the loss of a checkpoint for programs."""
    told = {"checkpoint": config.load_checkpoint, "split": config.eval_dataset.split, "text": result.describe()}
    with atomic_open(f"{config.output_dir}/{HELD_OUT}") as file:
        file.write(json.dumps(strict({**told, **vars(result)}), allow_nan=False) + "\n")


def make_store(config: RunConfig, peers: Peers, simulated: bool = False) -> CheckpointStore:
    """The store of a run's checkpoints, with what the callback's section says of it.

    A simulated rank saves all that it keeps, as there is no other to save what both have.
    """
    sections = (item for item in config.callbacks if isinstance(item, CheckpointMonitorConfig))
    section = next(sections, CheckpointMonitorConfig(type="CheckpointMonitor", keep_checkpoint_max=1))
    return CheckpointStore(
        Path(config.output_dir) / CHECKPOINTS,
        keep_checkpoint_max=section.keep_checkpoint_max,
        peers=peers,
        remove_redundancy=section.remove_redundancy and not simulated,
    )


def _announce(state: RunState, execution: Execution) -> None:
    config = state.config
    if execution.executor is not Executor.REPLICA:
        logger.info("%s", describe(config, execution))
    logger.info(
        "%s: %s parameters%s, global batch %d x %d tokens, steps %d to %d of %d",
        config.trainer.model_name or config.model.config.type,
        f"{config.model.config.parameter_count():,}",
        _trained_share(config),
        config.global_batch_size,
        config.model.config.seq_length,
        state.step + 1,
        state.last_step,
        state.total_steps,
    )


def _trained_share(config: RunConfig) -> str:
    """How many of the parameters are trained, where that is not all of them."""
    architecture = config.model.config.architecture
    trained, all_of_them = architecture.trained_parameter_count(), architecture.parameter_count()
    return f", {trained:,} of them trained ({trained / all_of_them:.2%})" if trained < all_of_them else ""


def export(state: RunState, store: CheckpointStore, tokenizer: Tokenizer | None) -> None:
    """Writes the weights as section ``export_hf`` says; of a process that does not have all of them, from the last checkpoint.

    Raises:
        UserError: ranks have parts of the weights, and the last step was not saved.
    """
    section = state.config.export_hf
    if not section.directory or state.step < state.total_steps:
        return
    dtype = section.dtype or state.config.model.config.param_init_type
    directory = export_hugging_face(
        section.directory,
        state.config.model.config.merged,
        _whole_weights(state, store),
        dtype=dtype,
        max_shard_bytes=size_in_bytes(section.max_shard_size),
        tokenizer=tokenizer,
        chat_template=state.config.chat_template,
    )
    logger.info("exported the weights to %s in %s", directory, dtype)
    state.results["Hugging Face directory"] = str(directory)


def _whole_weights(state: RunState, store: CheckpointStore) -> Mapping[str, Any]:
    held = state.engine.local_state()
    if state.engine.holds_all:
        return whole_weights(state, joined(tensors.weights for tensors in held.values()), "export_hf.directory")
    newest = store.newest()
    checkpoint = load_checkpoint(newest, with_optimizer=False) if newest is not None else None
    if checkpoint is None or checkpoint.step != state.step:
        message = "ranks have parts of the weights, and the last step was not saved; add the callback CheckpointMonitor"
        raise state.config.error("export_hf.directory", message)
    return whole_weights(state, checkpoint.weights, "export_hf.directory")
