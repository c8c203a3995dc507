"""Combinations of keys that cannot work: one function per subject, yielding the key at fault and what to write instead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from mindllm.architecture.optimizer_state import ADAMW, CODE_BITS, MUON, weight_of_cut_blocks
from mindllm.architecture.query_key_rows import query_key_rows, why_not_linear
from mindllm.architecture.tuners import ADALORA, FULL_TUNING, GALORE, LISA
from mindllm.config.checks import MODEL, Finding
from mindllm.config.checks.context_parallel import check_context_parallel
from mindllm.config.checks.experts import check_experts
from mindllm.config.checks.fine_grain_interleave import check_interleaved_rows
from mindllm.config.checks.layers import check_codes, check_latent_attention, check_prediction
from mindllm.config.checks.mesh import (
    check_devices,
    check_mesh,
    check_offset,
    check_pipeline,
    check_recompute,
    check_sharding,
    check_spikes,
)
from mindllm.config.checks.monitor import check_monitor
from mindllm.config.checks.pieces import check_pieces
from mindllm.config.checks.preference import check_preference
from mindllm.config.checks.tuning import check_tuning
from mindllm.config.decoder.keys import llama_intermediate_size
from mindllm.config.optimizer import (
    DecayingSchedule,
    DynamicLossScale,
    OptimizerConfig,
    Schedule,
    StableDecaySchedule,
    matches,
)
from mindllm.config.reading.document import KeyPath
from mindllm.config.reading.pretrained import check_family, check_pretrained
from mindllm.config.run import RunConfig
from mindllm.files import unexpanded

GENERATION: KeyPath = ("generation",)
GROUPS: KeyPath = ("grouped_lr_schedule", "grouped")
TRAINING = ("train", "finetune")
SECTION = "swap_config"
FILES_OF = {
    "BlendedMegatronDatasetDataLoader": "the prefix of indexed files (prefix.bin, prefix.idx)",
    "MindDataset": "the path of a MindRecord file",
    "CommonDataLoader": "the path of a file of conversations",
    "PreferenceDataLoader": "the path of a file of pairs of answers",
}
LONGEST_COMPOSED = 2**15  # tokens: 4 GiB in fp32 for the mask, and for the scores of each head


def check_generation(config: RunConfig) -> Iterator[Finding]:
    """Beam search, sampling, and how many continuations either gives."""
    options = config.generation
    beams, count = options.num_beams, options.num_return_sequences
    if beams > 1 and options.do_sample:
        yield (*GENERATION, "do_sample"), f"beam search does not draw; write false, or num_beams: 1 (value {beams})"
    if beams > 1 and options.stops:
        yield (
            (*GENERATION, "stop_strings"),
            f"beam search ends at the end of text only; write num_beams: 1 (value {beams})",
        )
    if beams > 1 and count > beams:
        message = f"{beams} beams give at most as many continuations (value {count}); write a larger num_beams"
        yield (*GENERATION, "num_return_sequences"), message
    if beams == 1 and count > 1 and not options.do_sample:
        message = f"there is one most likely token (value {count}); write do_sample: true, or a larger num_beams"
        yield (*GENERATION, "num_return_sequences"), message
    if config.run_mode == "chat" and max(beams, count) > 1:
        key = "num_beams" if beams > 1 else "num_return_sequences"
        yield (*GENERATION, key), f"run_mode chat writes one answer as it grows (value {max(beams, count)}); write 1"


def check_swap(config: RunConfig) -> Iterator[Finding]:
    """What is moved, and that it can be."""
    swap = config.swap_config
    if not swap.swap:
        for key in ("layer_swap", "op_swap"):
            if getattr(swap, key) is not None:
                yield (SECTION, key), "nothing is moved to the host (swap_config.swap: false); write true, or remove it"
        return
    sizes, layers = config.parallel_config, config.model.config.layer_count
    if sizes.pipeline_stage == 1:
        message = "MindSpore moves results only of a network that the micro-batches of a pipeline share (value true)"
        yield (SECTION, "swap"), f"{message}; write false, or parallel_config.pipeline_stage above 1"
    if beyond := sorted(number for number in swap.numbers() if number >= layers):
        yield (SECTION,), f"names layer {beyond[0]}, where layers have numbers from 0 to {layers - 1}"


def check_run(config: RunConfig) -> Iterator[Finding]:
    """Yield every finding of every subject, of a run whose sizes are within the limits (``checks/limits.py``)."""
    for check in (
        check_run_mode,
        check_pretrained,
        check_family,
        check_data,
        check_output,
        check_generation,
        check_schedule,
        check_optimizer,
        check_weight_groups,
        check_loss_scale,
        check_profile,
        check_callbacks,
        check_heads,
        check_latent_attention,
        check_layers,
        check_experts,
        check_prediction,
        check_tuning,
        check_codes,
        check_preference,
        check_sequence,
        check_tokens,
        check_mesh,
        check_devices,
        check_sharding,
        check_context_parallel,
        check_interleaved_rows,
        check_pipeline,
        check_pieces,
        check_spikes,
        check_monitor,
        check_offset,
        check_recompute,
        check_swap,
    ):
        yield from check(config)


def check_run_mode(config: RunConfig) -> Iterator[Finding]:
    """Which checkpoint the run starts from."""
    mode, resumes = config.run_mode, config.resume_training is not False
    if mode == "finetune" and not config.load_checkpoint and not resumes:
        yield ("load_checkpoint",), "run_mode finetune starts from a checkpoint; write its directory here"
    if mode in ("eval", "predict", "chat") and resumes:
        instead = "write load_checkpoint"
        yield ("resume_training",), f"run_mode {mode} does not train (value {config.resume_training}); {instead}"


def check_data(config: RunConfig) -> Iterator[Finding]:
    """The text that the mode reads."""
    data, kind = config.train_dataset.data_loader.config, config.train_dataset.data_loader.type
    loader: KeyPath = ("train_dataset", "data_loader", "config")
    if config.run_mode in ("predict", "chat") or (config.run_mode == "eval" and config.eval_tasks):
        if not config.processor.tokenizer.vocab_file:
            needing = "eval_tasks" if config.eval_tasks else f"run_mode {config.run_mode}"
            yield ("processor", "tokenizer", "vocab_file"), f"{needing} needs the path of a tokenizer"
        return
    if not all(data.data_paths) or not data.data_paths:
        yield (*loader, "data_path"), f"run_mode {config.run_mode} needs {FILES_OF[kind]}"
    if kind in ("CommonDataLoader", "PreferenceDataLoader") and not config.processor.tokenizer.vocab_file:
        yield (
            ("processor", "tokenizer", "vocab_file"),
            f"conversations need a tokenizer; write its path{_not_there(config)}",
        )
    weights = dict(zip(("train", "valid", "test"), data.split_weights, strict=True))
    if config.run_mode != "eval" and weights["train"] == 0:
        yield (*loader, "split"), f"leaves nothing to train on (value {data.split}); write for example 949,50,1"
    if (config.do_eval or config.run_mode == "eval") and weights[config.eval_dataset.split] == 0:
        part = config.eval_dataset.split
        yield (*loader, "split"), f"leaves nothing in the {part} part, which is evaluated (value {data.split})"


def _not_there(config: RunConfig) -> str:
    """What was to bring the tokenizer and does not exist."""
    named = {"load_checkpoint": config.load_checkpoint, "pretrained_model_dir": config.pretrained_model_dir}
    missing = next((key for key, path in named.items() if path and not Path(path).exists()), "")
    return f"; {missing}, which may bring one, does not exist{unexpanded(named[missing])}" if missing else ""


def check_output(config: RunConfig) -> Iterator[Finding]:
    """A directory that would be called ``~``."""
    if advice := unexpanded(config.output_dir):
        yield ("output_dir",), f"would be made by this very name (value {config.output_dir}){advice}"


def check_schedule(config: RunConfig) -> Iterator[Finding]:
    """Rates and lengths of the learning rate schedules: that of the run, and those of groups."""
    schedule = config.lr_schedule
    if (schedule is None or schedule.learning_rate is None) and config.run_mode in TRAINING:
        missing = ("lr_schedule", "learning_rate") if schedule else ("lr_schedule",)
        yield missing, f"this key is required: run_mode {config.run_mode} needs a learning rate"
    if schedule is not None:
        yield from _schedule(("lr_schedule",), schedule, config)
    for number, group in enumerate(config.grouped_lr_schedule.grouped):
        path = (*GROUPS, number)
        if group.learning_rate is None:
            yield (*path, "learning_rate"), "this key is required: a group has a rate of its own"
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
    is_long = any(_long_warmup(path, schedule, config))
    if isinstance(schedule, StableDecaySchedule) and is_long:
        total = schedule.total_steps if schedule.total_steps > 0 else config.runner_config.train_steps
        message = f"leaves none of the {total} steps to the decay (value {schedule.warmup_steps})"
        yield (*path, "warmup_steps"), f"{message}; write warmup_ratio instead"


def check_optimizer(config: RunConfig) -> Iterator[Finding]:
    """What Muon does not update, its keys where it is not the optimizer, what has moments of 8 bits or half precision."""
    optimizer, model = config.optimizer, config.model.config
    yield from _half_parameters(config)
    if optimizer.master_weights:
        yield from _master_weights(config)
    if optimizer.accumulate_in_float32 and not model.has_half_parameters:
        message = f"gradients are float32 anyway (param_init_type {model.param_init_type}); write false"
        yield ("optimizer", "accumulate_in_float32"), message
    if optimizer.state_bits == CODE_BITS:
        yield from _moments_of_8_bits(config)
        yield from _blocks_over_devices(config)
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
        message = f"pet_type {model.pet_config.pet_type} has an update of its own, or adapters (value Muon)"
        yield ("optimizer", "type"), f"{message}; write AdamW, or pet_type: full"
    if optimizer.qk_clip_threshold is not None:
        yield from _qk_clip(config)


def _half_parameters(config: RunConfig) -> Iterator[Finding]:
    """Updates that are written for parameters in float32."""
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
    """Parameters without a rounded copy, and updates that keep none."""
    key, optimizer, model = ("optimizer", "master_weights"), config.optimizer, config.model.config
    if not model.has_half_parameters:
        yield key, f"copies parameters in half precision (param_init_type {model.param_init_type}); write false"
    elif optimizer.type != ADAMW or optimizer.state_bits == CODE_BITS:
        yield key, f"is a key of type {ADAMW} with state_bits 32 (value true); write false"
    elif model.pet_config is not None and model.pet_config.pet_type != FULL_TUNING:
        yield key, f"pet_type {model.pet_config.pet_type} trains small weights (value true); write false"


def _qk_clip(config: RunConfig) -> Iterator[Finding]:
    """Attention whose logits cannot be scaled back by weights that are trained."""
    key, architecture = ("optimizer", "qk_clip_threshold"), config.model.config.architecture
    value = f"value {config.optimizer.qk_clip_threshold:g}"
    reasons = dict.fromkeys(why_not_linear(spec.attention) for spec in architecture.specifications())
    if reason := next(filter(None, reasons), ""):
        yield key, f"{reason} ({value}); leave it out"
    trained = architecture.trained_shapes()
    if frozen := next((name for name in query_key_rows(architecture) if name not in trained), ""):
        yield key, f"{frozen} is frozen, and is not scaled ({value}); train it, or leave the threshold out"


def _moments_of_8_bits(config: RunConfig) -> Iterator[Finding]:
    key, model, optimizer = ("optimizer", "state_bits"), config.model.config, config.optimizer
    if optimizer.type == MUON:
        yield key, f"is a key of type {ADAMW} (type here: {MUON}); write 32"
    if model.expert_num > 1:
        yield key, "weights of routed experts, of three dimensions, have moments of 32 bits (value 8); write 32"
    if model.pet_config is not None and model.pet_config.pet_type != FULL_TUNING:
        message = f"pet_type {model.pet_config.pet_type} trains small weights, or has an update of its own (value 8)"
        yield key, f"{message}; write 32, or pet_type: full"


def _blocks_over_devices(config: RunConfig) -> Iterator[Finding]:
    ranks, block = config.parallel_config.model_parallel, config.optimizer.block
    shapes = config.model.config.architecture.trained_shapes()
    if name := weight_of_cut_blocks(shapes, ranks, block):
        columns = shapes[name][-1] // ranks
        message = f"leaves {columns} columns of {name} on a rank, not whole blocks of {block} (value {ranks})"
        yield ("parallel_config", "model_parallel"), f"{message}; write optimizer.state_block_size: {_block(columns)}"


def _block(columns: int) -> int:
    """The largest power of two that divides them, up to the default."""
    return math.gcd(columns, OptimizerConfig.model_fields["state_block_size"].default)


def check_weight_groups(config: RunConfig) -> Iterator[Finding]:
    """Patterns of weights that match none."""
    names = list(config.model.config.architecture.trained_shapes())
    for number, group in enumerate(config.optimizer.weight_decay_groups):
        yield from _unmatched(("optimizer", "weight_decay_groups", number, "params"), group.params, names)
    pet = config.model.config.pet_config
    for number, rates in enumerate(config.grouped_lr_schedule.grouped):
        yield from _unmatched((*GROUPS, number, "params"), rates.params, names)
    if config.grouped_lr_schedule.grouped and pet is not None and pet.pet_type in (GALORE, LISA):
        yield GROUPS, f"pet_type {pet.pet_type} has one learning rate for all weights; remove the groups"


def _unmatched(path: KeyPath, patterns: tuple[str, ...], names: list[str]) -> Iterator[Finding]:
    """A layer may have any number: smaller models of a run have fewer layers."""
    for pattern in patterns:
        of_layers = re.sub(r"\blayers\.\d+", "layers.*", pattern)
        if not any(matches(name, (of_layers,)) for name in names):
            yield (
                path,
                f"matches no weight that is trained (value '{pattern}'); they are called {names[0]} or {names[-1]}",
            )


def check_loss_scale(config: RunConfig) -> Iterator[Finding]:
    """A dynamic loss scale that never falls would skip every step after the first overflow."""
    scale = config.runner_wrapper.scale_sense
    if isinstance(scale, DynamicLossScale) and scale.scale_factor == 1.0:
        instead = "write at least 2, or type: FixedLossScaleUpdateCell"
        yield ("runner_wrapper", "scale_sense", "scale_factor"), f"the scale would never change (value 1.0); {instead}"


def check_profile(config: RunConfig) -> Iterator[Finding]:
    """The window of the profiler."""
    if config.profile and config.profile_stop_step < config.profile_start_step:
        message = f"before profile_start_step {config.profile_start_step} (value {config.profile_stop_step})"
        yield ("profile_stop_step",), message
    devices = config.parallel_config.device_num
    for rank in config.profile_rank_ids or ():
        if not 0 <= rank < devices:
            yield ("profile_rank_ids",), f"no such rank (value {rank}); ranks are 0 to {devices - 1}"


def check_callbacks(config: RunConfig) -> Iterator[Finding]:
    """Every callback once."""
    seen: set[str] = set()
    for index, callback in enumerate(config.callbacks):
        if callback.type in seen:
            yield ("callbacks", index), f"{callback.type} stands in the list twice; remove one"
        seen.add(callback.type)


def check_heads(config: RunConfig) -> Iterator[Finding]:
    """Widths of heads and of the feed-forward."""
    model = config.model.config
    if model.kv_lora_rank is None and "head_dim" not in model.model_fields_set and model.hidden_size % model.num_heads:
        message = (
            f"does not divide hidden_size {model.hidden_size} (value {model.num_heads}); write another, or head_dim"
        )
        yield (*MODEL, "num_heads"), message
    elif model.kv_lora_rank is None and model.head_dim % 2:
        yield (*MODEL, "head_dim"), f"must be even, rotary positions turn pairs (value {model.head_dim})"
    if model.num_heads % model.n_kv_heads:
        message = f"must divide num_heads {model.num_heads} (value {model.n_kv_heads})"
        yield (*MODEL, "n_kv_heads"), message
    if model.ffn_dim_multiplier is not None:
        width = llama_intermediate_size(model.hidden_size, model.multiple_of, model.ffn_dim_multiplier)
        if width != model.intermediate_size:
            message = f"ffn_dim_multiplier {model.ffn_dim_multiplier} gives {width} (value {model.intermediate_size})"
            yield (*MODEL, "intermediate_size"), f"{message}; remove one of the two"


def check_layers(config: RunConfig) -> Iterator[Finding]:
    """What tells layers apart, and attention that has no fused kernel."""
    model = config.model.config
    types = model.layer_types
    if types is not None and len(types) not in (model.num_layers, model.placed_layers):
        message = f"must hold {model.num_layers} entries, one for each layer (num_layers), not {len(types)}"
        yield (*MODEL, "layer_types"), message
    if model.sliding_window is None:
        for key in ("sliding_window_pattern", "rope_local_base_freq"):
            if getattr(model, key) is not None:
                yield (
                    (*MODEL, key),
                    f"is about layers with a window (value {getattr(model, key)}); write sliding_window",
                )
        if types is not None and "sliding_attention" in types:
            yield (*MODEL, "layer_types"), "has layers with a window; write sliding_window, too"
    fused = all(spec.attention.can_be_fused for spec in model.architecture.specifications())
    if model.use_flash_attention is True and not fused:
        message = "the kernel has no soft cap and takes ALiBi in a form that is not used (value true); write auto"
        yield (*MODEL, "use_flash_attention"), message
    composed = not fused or model.use_flash_attention is False
    if composed and config.context.device_target != "CPU" and model.seq_length > LONGEST_COMPOSED:
        size = f"{model.seq_length**2 * 4 / 2**30:,.0f} GB"
        reason = "composed attention (ALiBi, soft caps, dropout, use_flash_attention: false) has a mask and scores of"
        message = f"{reason} [seq, seq], {size} each (value {model.seq_length}); write at most {LONGEST_COMPOSED}"
        yield (*MODEL, "seq_length"), message


def check_sequence(config: RunConfig) -> Iterator[Finding]:
    """The sequence length against the longest context and the slices of the loss."""
    model = config.model.config
    if model.seq_length > model.max_position_embedding:
        message = f"above max_position_embedding {model.max_position_embedding} (value {model.seq_length})"
        yield (*MODEL, "seq_length"), message
    if model.seq_length % model.loss_chunks:
        message = f"must divide seq_length {model.seq_length} (value {model.loss_chunks})"
        yield (*MODEL, "loss_chunks"), message
    scaling = model.rope_scaling
    if scaling is not None and scaling.type == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        message = f"must be above low_freq_factor {scaling.low_freq_factor} (value {scaling.high_freq_factor})"
        yield (*MODEL, "rope_scaling", "high_freq_factor"), message


def check_tokens(config: RunConfig) -> Iterator[Finding]:
    """Check that special tokens are rows of the embedding table, where the run writes texts."""
    if _generates(config):
        yield from _tokens_outside(config)


def _tokens_outside(config: RunConfig) -> Iterator[Finding]:
    model = config.model.config
    tokens = {"bos_token_id": (model.bos_token_id,), "pad_token_id": (model.pad_token_id,)}
    for key, ids in {**tokens, "eos_token_id": model.eos_token_ids}.items():
        for token in ids:
            if token is not None and token >= model.vocab_size:
                yield (*MODEL, key), f"must be below vocab_size {model.vocab_size} (value {token})"


def _generates(config: RunConfig) -> bool:
    on_tasks = bool(config.eval_tasks) or any(callback.type == "EvalTasks" for callback in config.callbacks)
    return config.run_mode in ("predict", "chat") or on_tasks


def check_unused(config: RunConfig) -> Iterator[Finding]:
    """Yield warnings: values that could not be used, in keys that this run does not use."""
    if not _generates(config):
        for path, message in _tokens_outside(config):
            yield path, f"{message}; not used by run_mode {config.run_mode}"
    if config.lr_schedule is not None:
        yield from _long_warmup(("lr_schedule",), config.lr_schedule, config)
    for number, group in enumerate(config.grouped_lr_schedule.grouped):
        yield from _long_warmup((*GROUPS, number), group, config)


def _long_warmup(path: KeyPath, schedule: Schedule, config: RunConfig) -> Iterator[Finding]:
    total = schedule.total_steps if schedule.total_steps > 0 else config.runner_config.train_steps
    if total is not None and schedule.warmup_steps is not None and schedule.warmup_steps > total:
        message = f"longer than the schedule of {total} steps, which ends below learning_rate"
        yield (*path, "warmup_steps"), f"{message} (value {schedule.warmup_steps}); warmup_ratio fits any length"
