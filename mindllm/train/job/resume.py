"""The state of a run in a checkpoint, next to its tensors, and resuming from it."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.train.checkpoint import Checkpoint
from mindllm.train.checkpoint.loading import BASE, SIMULATED, Base
from mindllm.train.state import RunState

logger = logging.getLogger(__name__)


def identity(config: RunConfig, total_steps: int) -> dict[str, Any]:
    """Return the keys that determine the losses: if all are equal, a resumed run repeats the uninterrupted one."""
    tree = config.model_dump(mode="json")
    sections = ("model", "optimizer", "lr_schedule", "grouped_lr_schedule", "runner_wrapper", "train_dataset")
    return {
        **{name: tree[name] for name in sections},
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "total_steps": total_steps,
    }


def run_state(state: RunState) -> dict[str, Any]:
    """Return the state that is saved with the tensors. Batches follow from the seed and the consumed samples."""
    return {
        "step": state.step,
        "consumed_samples": state.consumed_samples(state.step),
        "seed": state.config.seed,
        "tokenizer": state.config.processor.tokenizer.vocab_file,
        "loss_scaler": state.scaler.state(),
        "spikes": state.spikes.state(),
        "overflows": {"steps": state.counted_steps, "overflowed": state.overflows},
        SIMULATED: state.engine.simulated,
        "identity": identity(state.config, state.total_steps),
        **({BASE: asdict(state.base)} if state.base is not None else {}),
    }


def restore(state: RunState, checkpoint: Checkpoint) -> None:
    """Restore the state of a checkpoint. Keys that differ from those it was trained with are logged.

    Raises:
        UserError: the tensors do not fit the model of this run, or belong to other frozen weights.
    """
    base = Base.from_state(checkpoint.state)
    if base is not None and state.base is not None and base.fingerprint != state.base.fingerprint:
        saved, current = (one.path or "weights initialized from a seed" for one in (base, state.base))
        raise UserError(f"{checkpoint.path}: trained with {saved}, not with {current}; pass the same load_checkpoint")
    state.engine.load(checkpoint)
    state.scaler.load(checkpoint.state["loss_scaler"])
    state.spikes.load(checkpoint.state.get("spikes", {}))
    counted = checkpoint.state.get("overflows", {})  # missing in checkpoints of earlier versions
    state.counted_steps, state.overflows = int(counted.get("steps", 0)), int(counted.get("overflowed", 0))
    state.step = int(checkpoint.state["step"])
    state.sample_offset = sample_offset(state.config, checkpoint)
    changed = differences(checkpoint.state["identity"], identity(state.config, state.total_steps))
    for key, old, new in changed:
        logger.warning("%s was %s in %s and is %s now; losses will differ", key, old, checkpoint.path, new)
    logger.info("resumed from %s at step %d", checkpoint.path, state.step)
    if state.sample_offset:
        samples = state.consumed_samples(state.step)
        logger.info("the batch size has changed; continuing after %d consumed samples", samples)


def sample_offset(config: RunConfig, checkpoint: Checkpoint) -> int:
    """Return the samples consumed before ``checkpoint`` beyond those of as many steps with the batch size of ``config``.

    Checkpoints that do not record consumed samples were trained with the batch size they record from the first step on.
    """
    step, saved = int(checkpoint.state["step"]), checkpoint.state
    consumed = saved.get("consumed_samples")
    if consumed is None:
        consumed = step * int(saved["identity"].get("global_batch_size", config.global_batch_size))
    return int(consumed) - step * config.global_batch_size


def differences(saved: Any, current: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return the dotted keys whose values differ between two trees, with both values."""
    if isinstance(saved, dict) and isinstance(current, dict):
        names = [*saved, *(name for name in current if name not in saved)]
        return [
            difference
            for name in names
            for difference in differences(saved.get(name), current.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if saved == current else [(key, saved, current)]
