"""The run modes ``train``, ``finetune`` and ``eval``: from a configuration to a finished run and its report."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

from mindllm.command import INTERRUPTED
from mindllm.config import RunConfig, render_config
from mindllm.config.callbacks import CheckpointMonitorConfig
from mindllm.console import output
from mindllm.data import Tokenizer
from mindllm.files import atomic_open, size_in_bytes
from mindllm.logs import set_up_logging
from mindllm.models.weights import assign
from mindllm.tables import pairs
from mindllm.train.callbacks import make_callbacks
from mindllm.train.checkpoint import CheckpointStore
from mindllm.train.checkpoint.hugging_face_export import export_hugging_face, refuse_existing
from mindllm.train.checkpoint.pretrained import pretrained_weights
from mindllm.train.datasets import RunData
from mindllm.train.device import set_up_device
from mindllm.train.engine import Engine
from mindllm.train.loss_scale import LossScaler
from mindllm.train.ranks import started_ranks
from mindllm.train.resume import restore
from mindllm.train.runnable import refuse_what_is_only_compiled
from mindllm.train.schedule import learning_rates
from mindllm.train.state import RunState, last_step
from mindllm.train.trainer import Trainer
from mindllm.train.utilisation import peak_flops

RESOLVED_CONFIG = "config.yaml"
logger = logging.getLogger(__name__)


def train(config: RunConfig) -> int:
    """Trains from scratch, from ``load_checkpoint``, or on from a checkpoint; returns the exit code."""
    refuse_what_is_only_compiled(config)
    ranks = started_ranks(config)
    log = set_up_logging(config.output_dir)
    data = RunData(config, ranks)
    total_steps = data.total_steps
    rates = learning_rates(config.lr_schedule, total_steps)
    evaluator = data.evaluator() if config.do_eval else None
    store = make_store(config)
    if ranks.is_first:
        store.recover()
    ranks.meet()
    checkpoint = store.resume(config.resume_training) if config.resume_training else None
    if checkpoint is not None and checkpoint.step >= last_step(config, total_steps):
        logger.info("nothing to do: %s is at step %d, where this run ends", checkpoint.path, checkpoint.step)
        return 0
    if config.export_hf.directory:
        refuse_existing(Path(config.export_hf.directory))
    pretrained = pretrained_weights(config) if config.load_checkpoint and checkpoint is None else None
    set_up_device(config, ranks)
    if ranks.is_first:
        with atomic_open(f"{config.output_dir}/{RESOLVED_CONFIG}") as file:
            file.write(render_config(config))
    engine = Engine(config, ranks=ranks)
    state = RunState(config, engine, LossScaler(config.runner_wrapper.scale_sense), total_steps, data.steps_per_epoch)
    if checkpoint is not None:
        restore(state, checkpoint)
    elif pretrained is not None:
        assign(engine.weights, pretrained)
        logger.info("weights of %s", config.load_checkpoint)
    del checkpoint, pretrained
    _announce(state)
    callbacks = make_callbacks(config, store, evaluator, ranks)
    Trainer(state, data.train_stream(), rates, callbacks, peak_flops(config.context.device_target), ranks).run()
    if ranks.is_first:
        export(state, data.tokenizer)
    ranks.meet()
    state.results["log"] = str(log)
    _report(state.results)
    return INTERRUPTED if state.stop_reason == signal.Signals.SIGINT.name else 0


def evaluate(config: RunConfig) -> int:
    """Evaluates the weights of ``load_checkpoint`` on held-out text; returns the exit code."""
    if not config.load_checkpoint:
        raise config.error("load_checkpoint", "run_mode eval needs weights; give a checkpoint directory")
    refuse_what_is_only_compiled(config)
    ranks = started_ranks(config)
    set_up_logging(config.output_dir)
    evaluator = RunData(config, ranks).evaluator(progress=True)
    pretrained = pretrained_weights(config)
    set_up_device(config, ranks)
    engine = Engine(config, training=False, ranks=ranks)
    assign(engine.weights, pretrained)
    result = evaluator.run(engine)
    logger.info("%s on the %s split: %s", config.load_checkpoint, config.eval_dataset.split, result.describe())
    return 0


def make_store(config: RunConfig) -> CheckpointStore:
    """The store of a run's checkpoints, with what the callback's section says of it."""
    section = next((item for item in config.callbacks if isinstance(item, CheckpointMonitorConfig)), None)
    keep = section.keep_checkpoint_max if section is not None else 1
    return CheckpointStore(f"{config.output_dir}/checkpoint", keep_checkpoint_max=keep)


def export(state: RunState, tokenizer: Tokenizer | None) -> None:
    """Writes the weights as section ``export_hf`` says, once the last step of the whole run is done."""
    section = state.config.export_hf
    if not section.directory or state.step < state.total_steps:
        return
    weights, _ = state.engine.tensors()
    directory = export_hugging_face(
        section.directory,
        state.config.model.config,
        weights,
        dtype=section.dtype,
        max_shard_bytes=size_in_bytes(section.max_shard_size),
        tokenizer=tokenizer,
    )
    logger.info("exported the weights to %s in %s", directory, section.dtype)
    state.results["Hugging Face directory"] = str(directory)


def _announce(state: RunState) -> None:
    config = state.config
    logger.info(
        "%s: %s parameters, global batch %d x %d tokens, steps %d to %d of %d",
        config.trainer.model_name or config.model.config.type,
        f"{config.model.config.parameter_count():,}",
        config.global_batch_size,
        config.model.config.seq_length,
        state.step + 1,
        state.last_step,
        state.total_steps,
    )


def _report(results: dict[str, str]) -> None:
    output.print(pairs(results.items()))
