"""Cross checks of the optimizer, learning rates, groups of weights and the loss scale."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from mindllm.architecture.optimizer_state import ADAMW, CODE_BITS, MUON, weight_of_cut_blocks
from mindllm.architecture.query_key_rows import query_key_rows, why_not_linear
from mindllm.architecture.tuners import ADALORA, FULL_TUNING, GALORE, LISA
from mindllm.config.checks import MODEL, Finding
from mindllm.config.optimizer import (
    DecayingSchedule,
    DynamicLossScale,
    OptimizerConfig,
    Schedule,
    StableDecaySchedule,
    matches,
)
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

GROUPS: KeyPath = ("grouped_lr_schedule", "grouped")


TRAINING = ("train", "finetune")


def check_schedule(config: RunConfig) -> Iterator[Finding]:
    """Check rates and lengths of the learning rate schedules, of the run and of groups."""
    schedule = config.lr_schedule
    if (schedule is None or schedule.learning_rate is None) and config.run_mode in TRAINING:
        missing = ("lr_schedule", "learning_rate") if schedule else ("lr_schedule",)
        yield missing, f"this key is required: run_mode {config.run_mode} needs a learning rate"
    if schedule is not None:
        yield from _schedule(("lr_schedule",), schedule, config)
    for number, group in enumerate(config.grouped_lr_schedule.grouped):
        path = (*GROUPS, number)
        if group.learning_rate is None:
            yield (*path, "learning_rate"), "this key is required for each group"
        yield from _schedule(path, group, config)


def _schedule(path: KeyPath, schedule: Schedule, config: RunConfig) -> Iterator[Finding]:
    peak = schedule.learning_rate
    if peak is None:
        return
    if schedule.warmup_lr_init > peak:
        yield (*path, "warmup_lr_init"), f"above learning_rate {peak} (value {schedule.warmup_lr_init})"
    if isinstance(schedule, DecayingSchedule) and schedule.lr_end > peak:
        yield (*path, "lr_end"), f"above learning_rate {peak} (value {schedule.lr_end})"
    if isinstance(schedule, StableDecaySchedule) and schedule.decay_ratio + (schedule.warmup_ratio or 0.0) > 1.0:
        message = f"together with warmup_ratio {schedule.warmup_ratio} more than the run (value {schedule.decay_ratio})"
        yield (*path, "decay_ratio"), message
    if schedule.total_steps == 0:
        yield (*path, "total_steps"), "must be -1 (the length of the run) or at least 1 (value 0)"
    is_long = any(long_warmup(path, schedule, config))
    if isinstance(schedule, StableDecaySchedule) and is_long:
        total = schedule.total_steps if schedule.total_steps > 0 else config.runner_config.train_steps
        message = f"leaves none of the {total} steps to the decay (value {schedule.warmup_steps})"
        yield (*path, "warmup_steps"), f"{message}; write warmup_ratio instead"


def check_optimizer(config: RunConfig) -> Iterator[Finding]:
    """Check keys of other optimizers, quantized moments and half precision."""
    optimizer, model = config.optimizer, config.model.config
    yield from _half_parameters(config)
    if optimizer.master_weights:
        yield from _master_weights(config)
    if optimizer.accumulate_in_float32 and not model.has_half_parameters:
        message = f"gradients are float32 anyway (param_init_type {model.param_init_type}); write false"
        yield ("optimizer", "accumulate_in_float32"), message
    if optimizer.state_bits == CODE_BITS:
        yield from _quantized_moments(config)
    elif optimizer.state_block_size != OptimizerConfig.model_fields["state_block_size"].default:
        yield ("optimizer", "state_block_size"), "is a key of state_bits: 8 (value of that: 32); leave it out"
    if optimizer.type != MUON:
        for key in ("momentum", "nesterov", "matched_adamw_rms", "ns_steps", "ns_coefficients", "qk_clip_threshold"):
            if getattr(optimizer, key) != OptimizerConfig.model_fields[key].default:
                yield ("optimizer", key), f"is a key of type Muon (type here: {optimizer.type}); leave it out"
        return
    if len(optimizer.ns_coefficients) > optimizer.ns_steps:
        message = f"has {len(optimizer.ns_coefficients)} entries for {optimizer.ns_steps} steps"
        yield ("optimizer", "ns_coefficients"), f"{message}; write a larger ns_steps"
    if model.pet_config is not None and model.pet_config.pet_type != FULL_TUNING:
        message = f"pet_type {model.pet_config.pet_type} has its own update or adapters (value Muon)"
        yield ("optimizer", "type"), f"{message}; write AdamW, or pet_type: full"
    if optimizer.qk_clip_threshold is not None:
        yield from _qk_clip(config)


def _half_parameters(config: RunConfig) -> Iterator[Finding]:
    """Check that the update supports parameters in half precision."""
    model, key = config.model.config, (*MODEL, "param_init_type")
    pet = model.pet_config
    if not model.has_half_parameters or config.run_mode not in ("train", "finetune"):
        return
    if pet is not None and pet.tuner.name in (ADALORA, GALORE, LISA):
        yield (
            key,
            f"pet_type {pet.pet_type} updates float32 parameters alone (value {model.param_init_type}); write float32",
        )


def _master_weights(config: RunConfig) -> Iterator[Finding]:
    """Check that master weights have parameters to copy and an update that keeps them."""
    key, optimizer, model = ("optimizer", "master_weights"), config.optimizer, config.model.config
    if not model.has_half_parameters:
        yield key, f"copies parameters in half precision (param_init_type {model.param_init_type}); write false"
    elif optimizer.type != ADAMW or optimizer.state_bits == CODE_BITS:
        yield key, f"is a key of type {ADAMW} with state_bits 32 (value true); write false"
    elif model.pet_config is not None and model.pet_config.pet_type != FULL_TUNING:
        yield key, f"pet_type {model.pet_config.pet_type} trains small weights (value true); write false"


def _qk_clip(config: RunConfig) -> Iterator[Finding]:
    """Check that QK-clip can scale the attention logits by trained weights."""
    key, architecture = ("optimizer", "qk_clip_threshold"), config.model.config.architecture
    value = f"value {config.optimizer.qk_clip_threshold:g}"
    reasons = dict.fromkeys(why_not_linear(spec.attention) for spec in architecture.specifications())
    if reason := next(filter(None, reasons), ""):
        yield key, f"{reason} ({value}); leave it out"
    trained = architecture.trained_shapes()
    if frozen := next((name for name in query_key_rows(architecture) if name not in trained), ""):
        yield key, f"{frozen} is frozen, and is not scaled ({value}); train it, or leave the threshold out"


def _quantized_moments(config: RunConfig) -> Iterator[Finding]:
    key, model, optimizer = ("optimizer", "state_bits"), config.model.config, config.optimizer
    if optimizer.type == MUON:
        yield key, f"is a key of type {ADAMW} (type here: {MUON}); write 32"
    if model.expert_num > 1:
        yield key, "weights of routed experts, of three dimensions, have moments of 32 bits (value 8); write 32"
    if model.pet_config is not None and model.pet_config.pet_type != FULL_TUNING:
        message = f"pet_type {model.pet_config.pet_type} trains small weights or has its own update (value 8)"
        yield key, f"{message}; write 32, or pet_type: full"
    # ranks must hold complete blocks of each row
    ranks, block = config.parallel_config.model_parallel, optimizer.block
    shapes = model.architecture.trained_shapes()
    if name := weight_of_cut_blocks(shapes, ranks, block):
        columns = shapes[name][-1] // ranks
        fitting = math.gcd(columns, OptimizerConfig.model_fields["state_block_size"].default)  # a power of two
        message = f"leaves {columns} columns of {name} on a rank, not whole blocks of {block} (value {ranks})"
        yield ("parallel_config", "model_parallel"), f"{message}; write optimizer.state_block_size: {fitting}"


def check_weight_groups(config: RunConfig) -> Iterator[Finding]:
    """Check that every pattern of weight groups matches a weight."""
    names = list(config.model.config.architecture.trained_shapes())
    for number, group in enumerate(config.optimizer.weight_decay_groups):
        yield from _unmatched(("optimizer", "weight_decay_groups", number, "params"), group.params, names)
    pet = config.model.config.pet_config
    for number, rates in enumerate(config.grouped_lr_schedule.grouped):
        yield from _unmatched((*GROUPS, number, "params"), rates.params, names)
    if config.grouped_lr_schedule.grouped and pet is not None and pet.pet_type in (GALORE, LISA):
        yield GROUPS, f"pet_type {pet.pet_type} has one learning rate for all weights; remove the groups"


def _unmatched(path: KeyPath, patterns: tuple[str, ...], names: list[str]) -> Iterator[Finding]:
    """Yield patterns without a match. Layer numbers are ignored because reduced runs have fewer layers."""
    for pattern in patterns:
        any_layer = re.sub(r"\blayers\.\d+", "layers.*", pattern)
        if not any(matches(name, (any_layer,)) for name in names):
            yield (
                path,
                f"matches no weight that is trained (value '{pattern}'); they are called {names[0]} or {names[-1]}",
            )


def check_loss_scale(config: RunConfig) -> Iterator[Finding]:
    """Check that a dynamic loss scale can decrease; otherwise every step after the first overflow is skipped."""
    scale = config.runner_wrapper.scale_sense
    if isinstance(scale, DynamicLossScale) and scale.scale_factor == 1.0:
        instead = "write at least 2, or type: FixedLossScaleUpdateCell"
        yield ("runner_wrapper", "scale_sense", "scale_factor"), f"the scale would never change (value 1.0); {instead}"


def long_warmup(path: KeyPath, schedule: Schedule, config: RunConfig) -> Iterator[Finding]:
    """Yield a finding if the warmup is longer than the run."""
    total = schedule.total_steps if schedule.total_steps > 0 else config.runner_config.train_steps
    if total is not None and schedule.warmup_steps is not None and schedule.warmup_steps > total:
        message = f"longer than the schedule of {total} steps, which ends below learning_rate"
        yield (*path, "warmup_steps"), f"{message} (value {schedule.warmup_steps}); warmup_ratio fits any length"
