"""All cross checks of a run. Each function yields the keys at fault, with the problem and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindllm.architecture.optimizer_state import CODE_BITS, MUON
from mindllm.architecture.tuners import ADALORA, GALORE, LISA
from mindllm.config.callbacks import KEYS, UPDATE
from mindllm.config.checks import MODEL, Finding
from mindllm.config.checks.layers import (
    check_codes,
    check_experts,
    check_heads,
    check_latent_attention,
    check_layers,
    check_prediction,
    check_sequence,
)
from mindllm.config.checks.mesh import (
    check_devices,
    check_mesh,
    check_offset,
    check_pipeline,
    check_recompute,
    check_sharding,
    check_spikes,
)
from mindllm.config.checks.optimizer import (
    GROUPS,
    check_loss_scale,
    check_optimizer,
    check_schedule,
    check_weight_groups,
    long_warmup,
)
from mindllm.config.checks.sequence import check_context_parallel, check_interleaved_rows, check_pieces
from mindllm.config.checks.tuning import check_preference, check_tuning
from mindllm.config.reading.document import KeyPath, at, dotted
from mindllm.config.reading.pretrained import check_family, check_pretrained
from mindllm.config.run import RunConfig
from mindllm.errors import shortened
from mindllm.files import unexpanded

GENERATION: KeyPath = ("generation",)
SECTION = "swap_config"
DATA_FILES = {
    "BlendedMegatronDatasetDataLoader": "the prefix of indexed files (prefix.bin, prefix.idx)",
    "MindDataset": "the path of a MindRecord file",
    "CommonDataLoader": "the path of a file of conversations",
    "PreferenceDataLoader": "the path of a file of pairs of answers",
}


def check_generation(config: RunConfig) -> Iterator[Finding]:
    """Check beam search, sampling and the number of continuations."""
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
    """Check the layers of ``swap_config``, and that MindSpore can move their results."""
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
    """Yield every finding of every subject, of a run whose sizes are within :func:`check_limits`."""
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
    """Check the checkpoint that the run starts from."""
    mode, resumes = config.run_mode, config.resume_training is not False
    if mode == "finetune" and not config.load_checkpoint and not resumes:
        yield ("load_checkpoint",), "run_mode finetune starts from a checkpoint; write its directory here"
    if mode in ("eval", "predict", "chat") and resumes:
        instead = "write load_checkpoint"
        yield ("resume_training",), f"run_mode {mode} does not train (value {config.resume_training}); {instead}"


def check_data(config: RunConfig) -> Iterator[Finding]:
    """Check the data of the run mode."""
    data, kind = config.train_dataset.data_loader.config, config.train_dataset.data_loader.type
    loader: KeyPath = ("train_dataset", "data_loader", "config")
    if config.run_mode in ("predict", "chat") or (config.run_mode == "eval" and config.eval_tasks):
        if not config.processor.tokenizer.vocab_file:
            needing = "eval_tasks" if config.eval_tasks else f"run_mode {config.run_mode}"
            yield ("processor", "tokenizer", "vocab_file"), f"{needing} needs the path of a tokenizer"
        return
    if not all(data.data_paths) or not data.data_paths:
        yield (*loader, "data_path"), f"run_mode {config.run_mode} needs {DATA_FILES[kind]}"
    if kind in ("CommonDataLoader", "PreferenceDataLoader") and not config.processor.tokenizer.vocab_file:
        yield (
            ("processor", "tokenizer", "vocab_file"),
            f"conversations need a tokenizer; write its path{_missing_directory_hint(config)}",
        )
    weights = dict(zip(("train", "valid", "test"), data.split_weights, strict=True))
    if config.run_mode != "eval" and weights["train"] == 0:
        yield (*loader, "split"), f"leaves nothing to train on (value {data.split}); write for example 949,50,1"
    if (config.do_eval or config.run_mode == "eval") and weights[config.eval_dataset.split] == 0:
        part = config.eval_dataset.split
        yield (*loader, "split"), f"leaves nothing in the {part} part, which is evaluated (value {data.split})"


def _missing_directory_hint(config: RunConfig) -> str:
    """Return a hint about a missing directory that would supply the tokenizer; empty if there is none."""
    named = {"load_checkpoint": config.load_checkpoint, "pretrained_model_dir": config.pretrained_model_dir}
    missing = next((key for key, path in named.items() if path and not Path(path).exists()), "")
    return f"; {missing}, which may bring one, does not exist{unexpanded(named[missing])}" if missing else ""


def check_output(config: RunConfig) -> Iterator[Finding]:
    """Check that the output directory is not called ``~``."""
    if advice := unexpanded(config.output_dir):
        yield ("output_dir",), f"would be made by this very name (value {config.output_dir}){advice}"


def check_profile(config: RunConfig) -> Iterator[Finding]:
    """Check the window and the ranks of the profiler."""
    if config.profile and config.profile_stop_step < config.profile_start_step:
        message = f"before profile_start_step {config.profile_start_step} (value {config.profile_stop_step})"
        yield ("profile_stop_step",), message
    devices = config.parallel_config.device_num
    for rank in config.profile_rank_ids or ():
        if not 0 <= rank < devices:
            yield ("profile_rank_ids",), f"no such rank (value {rank}); ranks are 0 to {devices - 1}"


def check_callbacks(config: RunConfig) -> Iterator[Finding]:
    """Check that every callback is listed once."""
    types: set[str] = set()
    for index, callback in enumerate(config.callbacks):
        if callback.type in types:
            yield ("callbacks", index), f"{callback.type} stands in the list twice; remove one"
        types.add(callback.type)


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
        yield from long_warmup(("lr_schedule",), config.lr_schedule, config)
    for number, group in enumerate(config.grouped_lr_schedule.grouped):
        yield from long_warmup((*GROUPS, number), group, config)


LIMITS = {
    "model.model_config.num_layers": 10_000,
    "model.model_config.num_nextn_predict_layers": 10_000,
    "model.model_config.hidden_size": 2**20,
    "model.model_config.intermediate_size": 2**22,
    "model.model_config.expert_num": 2**16,
    "model.model_config.moe_intermediate_size": 2**22,
    "model.model_config.num_heads": 2**16,
    "model.model_config.head_dim": 2**16,
    "model.model_config.q_lora_rank": 2**20,
    "model.model_config.kv_lora_rank": 2**20,
    "model.model_config.qk_nope_head_dim": 2**16,
    "model.model_config.qk_rope_head_dim": 2**16,
    "model.model_config.v_head_dim": 2**16,
    "model.model_config.vocab_size": 2**26,
    "model.model_config.seq_length": 2**26,
    "model.model_config.max_position_embedding": 2**26,
    "model.model_config.pp_interleave_num": 1024,
    "runner_config.batch_size": 2**20,
    "runner_config.gradient_accumulation_steps": 2**20,
    "parallel_config.data_parallel": 2**20,
    "parallel_config.model_parallel": 2**16,
    "parallel_config.expert_parallel": 2**16,
    "parallel_config.pipeline_stage": 10_000,
    "parallel_config.micro_batch_num": 2**16,
    "eval_dataset.batch_size": 2**20,
    "generation.max_new_tokens": 2**26,
    "generation.num_beams": 1024,
    "generation.num_return_sequences": 2**16,
    "predict_batch_size": 2**16,
}
"""The largest value of keys whose size decides memory and time, some times above any model or cluster there is."""


LARGEST_INTEGER = 2**63 - 1


def check_limits(config: RunConfig) -> Iterator[Finding]:
    """Yield every key that is above its limit, and every integer of more than 64 bits."""
    tree = config.model_dump(by_alias=True)
    for key, limit in LIMITS.items():
        path = tuple(key.split("."))
        value = at(tree, path)
        if isinstance(value, int) and value > limit:
            yield path, f"no machine has room for it (value {shortened(value)}); write at most {limit}"
    for place, value in _integers(tree, ()):
        if abs(value) > LARGEST_INTEGER and dotted(place) not in LIMITS:
            yield place, f"has more than 64 bits (value {shortened(value)}); write at most {LARGEST_INTEGER}"


def _integers(tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    """Yield the integers of a tree with the paths of their keys; those of a list have the path of the list."""
    if isinstance(tree, int) and not isinstance(tree, bool):
        yield path, tree
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from _integers(value, (*path, key))
    for value in tree if isinstance(tree, list | tuple) else ():
        yield from _integers(value, path)


MONITOR = "monitor_config"


def check_monitor(config: RunConfig) -> Iterator[Finding]:
    """What is watched, and that it can be."""
    monitor = config.monitor_config
    watched = monitor.watched()
    if monitor.monitor_on and not watched:
        yield (MONITOR, "monitor_on"), f"computes nothing; write false, or one of {', '.join(KEYS.values())}: log"
    pet, otherwise = config.model.config.pet_config, ""
    if pet is not None and pet.tuner.name in (ADALORA, GALORE, LISA):
        otherwise = pet.pet_type
    elif config.optimizer.type == MUON:
        otherwise = f"optimizer.type {MUON}"
    elif config.optimizer.state_bits == CODE_BITS:
        otherwise = f"optimizer.state_bits {CODE_BITS}"
    elif config.model.config.has_half_parameters:
        otherwise = f"a rounded parameter (param_init_type {config.model.config.param_init_type})"
    if UPDATE in watched and otherwise:
        yield (
            (MONITOR, KEYS[UPDATE]),
            f"is found from the moments of AdamW, and {otherwise} updates otherwise; write null",
        )
