"""Keys of the run as a whole, of its layout, profile, evaluation, generation and monitors, and their translation."""

from __future__ import annotations

from mindllm.config.callbacks import KEYS
from mindllm.config.reading.document import leaves
from mindllm.mindformers.experts import keys_below
from mindllm.mindformers.model_keys import GENERATION, WRITING
from mindllm.mindformers.reading import Reading, Table, decided, idle, moved, only, used

MONITOR_SECTION = "monitor_config"
ON, INTERVAL = "monitor_on", "step_interval"
BY_GROUP = "by group of layers, over all devices, in place of each rank's part of each weight"
FIGURES = {"local_norm_format": BY_GROUP, "weight_state_format": BY_GROUP, "max_attention_logit_format": ""}
"""Figures that mindllm has under the same key."""

LOSS = "metrics.jsonl has the loss over all tokens of a step, and no part of one"
ALL_WEIGHTS = "figures are of all weights, by group of layers"
OTHER_FIGURES = {
    "dump_path": "figures go through no files on the way: metrics.jsonl and the trackers of callbacks have them",
    "target": ALL_WEIGHTS,
    "invert": ALL_WEIGHTS,
    "local_loss_format": LOSS,
    "device_local_loss_format": LOSS,
    "device_local_norm_format": "metrics.jsonl has global_norm over all devices; local_norm_format has it by group of layers",
    "optimizer_state_format": "norms of moments are not computed; update_ratio_format has the size of updates",
    "throughput_baseline": "metrics.jsonl has tokens per second, which nothing is compared with",
    "stable_rank_config": "stable ranks of weights are not computed",
    "global_norm_spike_threshold": "no spike ends a run; runner_wrapper.skip_spikes leaves such steps out",
    "global_norm_spike_count_threshold": "no spike ends a run; runner_wrapper.skip_spikes leaves such steps out",
}
ENDING = {
    "print_struct": "the run would end once the names of its weights are printed; write false",
    "check_for_global_norm": "no run ends at a spike here; write false, and runner_wrapper.skip_spikes in a YAML of mindllm, "
    "which leaves such steps out",
    "health_checkpoint": "no run ends at a spike here, and checkpoints are checked by checksums; leave it out",
}
"""By which a run ends there."""

MONITOR: Table = {
    f"{MONITOR_SECTION}.{ON}": decided(
        f"{MONITOR_SECTION}.{ON}", "false where none of the figures is one that mindllm has"
    ),
    f"{MONITOR_SECTION}.{INTERVAL}": decided(f"{MONITOR_SECTION}.{INTERVAL}"),
    **{f"{MONITOR_SECTION}.{name}": decided(f"{MONITOR_SECTION}.{name}", reason) for name, reason in FIGURES.items()},
    **{f"{MONITOR_SECTION}.{name}": idle(reason) for name, reason in OTHER_FIGURES.items()},
    **{f"{MONITOR_SECTION}.{name}": only(False, None, reason="off", otherwise=why) for name, why in ENDING.items()},
}
MONITOR |= {
    f"{MONITOR_SECTION}.{name}.*": MONITOR[f"{MONITOR_SECTION}.{name}"]
    for name in ("stable_rank_config", "health_checkpoint")
}

GRADIENT = "monitor_config.local_norm_format of mindllm has the norm of gradients by group of layers"
PYNATIVE_MONITOR: Table = {
    "monitor.train_state.local_norm": idle(GRADIENT),
    "monitor.train_state.device_norm": idle(GRADIENT),
    "monitor.train_state.local_loss": idle(LOSS),
    "monitor.train_state.device_loss": idle(LOSS),
    "monitor.tensorboard.*": idle("it only watches; callbacks: TensorBoard writes event files"),
    "monitor.moe_monitor.*": idle("it only watches; metrics.jsonl has the loads of experts"),
    "monitor.health_checkpoint.*": idle("MindFormers' PyNative trainer reads it nowhere"),
    "monitor.*": idle("it only watches; metrics.jsonl and monitor_config of mindllm have such figures"),
}

UNSHARDED = "checkpoints hold whole parameters, whatever the layout they are read into"
DATA_SINKING = "every step is one call of the compiled graph, without data sinking"
ALWAYS_SAFETENSORS = "checkpoints are safetensors; files of other formats are detected"
DETERMINISTIC_DATA = "a batch is a function of (seed, consumed samples), whatever reads it"
PROFILE = "the profile is that of level 1, which has shapes, and otherwise of MindSpore with its defaults"

RUN: Table = {
    "seed": used(),
    "output_dir": used(),
    "run_mode": decided("run_mode"),
    "use_parallel": used(),
    "load_checkpoint": used(),
    "resume_training": used(),
    "pretrained_model_dir": used(),
    "load_ckpt_format": idle(ALWAYS_SAFETENSORS),
    "auto_trans_ckpt": idle(UNSHARDED),
    "transform_process_num": idle(UNSHARDED),
    "src_strategy_path_or_dir": idle(UNSHARDED),
    "load_ckpt_async": idle("weights are read one tensor at a time"),
    "balanced_load": idle("weights are read one tensor at a time"),
    "remove_redundancy": idle(UNSHARDED),
    "only_save_strategy": only(
        False,
        None,
        reason=UNSHARDED,
        otherwise="no strategy files are needed; mindllm dry-run compiles without a device",
    ),
    "ignore_data_skip": only(
        False, None, reason=DETERMINISTIC_DATA, otherwise="a resumed run continues with the next sample"
    ),
    "data_skip_steps": only(
        None, 0, reason=DETERMINISTIC_DATA, otherwise="a resumed run continues with the next sample"
    ),
    "use_legacy": idle("one decoder stands for both kinds of networks"),
    "use_legacy_format": idle("one format of checkpoints, written whole or not at all"),
    "do_eval": decided("do_eval"),
    "eval_step_interval": decided("eval_step_interval"),
    "eval_epoch_interval": idle("eval_step_interval decides when to evaluate"),
    "eval_callbacks.*": idle("do_eval and eval_step_interval say when to evaluate"),
    "metric.*": idle("loss, perplexity and bits per byte are always reported"),
    "metric": idle("loss, perplexity and bits per byte are always reported"),
    "print_separate_loss": idle("a dense model has one loss"),
    "train_precision_sync": used(),
    "infer_precision_sync": moved("train_precision_sync"),
    "micro_batch_interleave_num": decided(
        "micro_batch_interleave_num", "runner_config.batch_size has the samples of all copies"
    ),
    "layer_scale": only(False, None, reason="off", otherwise="every layer learns at the same rate here"),
    "layer_decay": idle("layer_scale is off, and this is a part of it"),
    "lr_scale": only(False, None, reason="off", otherwise="the learning rate is the one of lr_schedule here"),
    "lr_scale_factor": idle("lr_scale is off, and this is a part of it"),
    "grouped_lr_schedule.*": decided("lr_schedule, grouped_lr_schedule.grouped"),
    "profile": used(),
    "profile_start_step": decided("profile_start_step"),
    "profile_stop_step": decided("profile_stop_step"),
    "profile_memory": decided("profile_memory"),
    "profile_rank_ids": decided("profile_rank_ids"),
    "with_stack": decided("with_stack"),
    "init_start_profile": idle(PROFILE),
    "profile_communication": idle(PROFILE),
    "profile_pipeline": idle(PROFILE),
    "profile_level": idle(PROFILE),
    "profiler_level": idle(PROFILE),
    "profile_output": idle(PROFILE),
    "data_simplification": idle(PROFILE),
    "mstx": idle(PROFILE),
    "auto_tune": idle(DETERMINISTIC_DATA),
    "filepath_prefix": idle(DETERMINISTIC_DATA),
    "autotune_per_step": idle(DETERMINISTIC_DATA),
    "remote_save_url": idle("nothing is uploaded"),
    "save_file": used(),
    "input_data": used(),
    "predict_batch_size": used(),
    "predict_data": moved("input_data"),
    "adapter_id": only(None, reason="empty", otherwise="adapters are not here yet"),
    "exclude_cann_cpu": idle("processes are bound to no cores"),
    "postprocess_use_numpy": idle("sampling is compiled, or native code"),
    "use_skip_data_by_global_norm": only(
        False,
        None,
        reason="off",
        otherwise="write runner_wrapper.skip_spikes in a YAML of mindllm; its range runs, and has no fixed threshold",
    ),
    "use_checkpoint_health_monitor": only(False, None, reason="off", otherwise="checkpoints are checked by checksums"),
    **MONITOR,
    "tensorboard.*": idle("it only watches; callbacks: TensorBoard writes its event files"),
    "swap_config.swap": decided("swap_config.swap"),
    "swap_config.default_prefetch": decided("swap_config.default_prefetch"),
    "swap_config.layer_swap": decided("swap_config.layer_swap"),
    "swap_config.layer_swap.*": decided("swap_config.layer_swap"),
    "swap_config.op_swap": decided("swap_config.op_swap"),
    "swap_config.op_swap.*": decided("swap_config.op_swap"),
    "infer.*": idle("files of MindSpore Lite; run_mode predict compiles its own graphs"),
    "trainer.type": only(
        "CausalLanguageModelingTrainer",
        reason="models are language models",
        otherwise="models are language models that predict the next token",
    ),
    "trainer.model_name": used(),
    "trainer.model_name_or_path": moved("trainer.model_name"),
    "runner_config.batch_size": decided("runner_config.batch_size"),
    "runner_config.epochs": used(),
    "runner_config.gradient_accumulation_steps": decided("runner_config.gradient_accumulation_steps"),
    "runner_config.stop_step": used(),
    "runner_config.train_steps": used(),
    "runner_config.sink_mode": idle(DATA_SINKING),
    "runner_config.sink_size": idle(DATA_SINKING),
    "runner_config.per_epoch_size": idle(DATA_SINKING),
    "runner_config.num_classes": idle("models are language models"),
    "context.mode": used(),
    "context.device_target": used(),
    "context.device_id": used(),
    "context.max_device_memory": used(),
    "context.max_call_depth": used(),
    "context.save_graphs": used(),
    "context.save_graphs_path": used(),
    "context.memory_optimize_level": used(),
    "context.jit_config.jit_level": used(),
    "context.jit_level": moved("context.jit_config.jit_level"),
    "context.infer_boost": idle("kernels are chosen for the device"),
    "context.enable_graph_kernel": used(),
    "context.runtime_num_threads": used(),
    "context.deterministic": decided("train_precision_sync"),
    "context.graph_kernel_flags": idle("fusion runs with its own defaults"),
    "context.ascend_config.precision_mode": only(
        "must_keep_origin_dtype",
        reason="dtypes are always those of model.model_config",
        otherwise="dtypes are always those of model.model_config (must_keep_origin_dtype)",
    ),
    "context.ascend_config.parallel_speed_up_json_path": idle(
        "it only overlaps communication with computing; its keys change nothing in graphs compiled here: docs/overlap.md"
    ),
    "context.ascend_config.*": idle("set by MindSpore"),
    "context.mempool_block_size": idle("MindSpore's own; max_device_memory is the limit"),
    "context.affinity_cpu_list": idle("processes are bound to no cores"),
}
LAYOUT_FILES = "no layout files are needed: checkpoints hold whole parameters"
DECLARED = "strategies are declared, not searched"
SUMS = "gradients are sums over tokens, divided once by the tokens of the global batch"

PARALLEL: Table = {
    "parallel.parallel_mode": decided("parallel.parallel_mode", DECLARED),
    "parallel.full_batch": decided("parallel.full_batch"),
    "parallel.dataset_strategy": decided("parallel.full_batch"),
    "parallel.gradients_mean": idle(SUMS),
    "parallel.loss_repeated_mean": idle(SUMS),
    "parallel.enable_alltoall": idle("only layouts of experts and of sequences need it"),
    "parallel.search_mode": idle(DECLARED),
    "parallel.auto_pipeline": only(False, None, reason="off", otherwise="stages are planned by mindllm plan"),
    "parallel.enable_parallel_optimizer": used(),
    "parallel.parallel_optimizer_config.gradient_accumulation_shard": used(),
    "parallel.parallel_optimizer_config.parallel_optimizer_threshold": used(),
    "parallel.parallel_optimizer_config.optimizer_weight_shard_size": decided(),
    "parallel.pipeline_config.pipeline_interleave": decided("parallel.pipeline_config.pipeline_interleave"),
    "parallel.pipeline_config.pipeline_scheduler": decided("parallel.pipeline_config.pipeline_scheduler"),
    "parallel.strategy_ckpt_save_file": idle(LAYOUT_FILES),
    "parallel.strategy_ckpt_config.*": idle(LAYOUT_FILES),
    "parallel.device_num": idle("parallel_config multiplies to it"),
    "parallel_config.data_parallel": decided("parallel_config.data_parallel"),
    "parallel_config.model_parallel": decided("parallel_config.model_parallel"),
    "parallel_config.pipeline_stage": decided("parallel_config.pipeline_stage"),
    "parallel_config.micro_batch_num": decided("parallel_config.micro_batch_num"),
    "parallel_config.use_seq_parallel": decided("parallel_config.use_seq_parallel"),
    "parallel_config.vocab_emb_dp": decided("parallel_config.vocab_emb_dp"),
    "parallel_config.gradient_aggregation_group": used(),
    "parallel_config.optimizer_shard": idle(
        "another name of parallel.enable_parallel_optimizer, which decides", "parallel.enable_parallel_optimizer"
    ),
    "parallel_config.context_parallel": decided("parallel_config.context_parallel"),
    "parallel_config.context_parallel_algo": decided("parallel_config.context_parallel_algo"),
    "parallel_config.ulysses_degree_in_cp": decided("parallel_config.context_parallel_algo"),
    "parallel_config.seq_split_num": decided("parallel_config.seq_split_num"),
    "parallel_config.expert_parallel": decided("parallel_config.expert_parallel"),
    "parallel_config.expert_model_parallel": decided("parallel_config.expert_model_parallel"),
    "parallel_config.mem_coeff": idle(DECLARED),
    "recompute_config.recompute": decided("recompute_config.recompute"),
    "recompute_config.select_recompute": decided("recompute_config.select_recompute"),
    "recompute_config.select_recompute.*": decided("recompute_config.select_recompute"),
    "recompute_config.select_comm_recompute": decided("recompute_config.select_comm_recompute"),
    "recompute_config.select_comm_recompute.*": decided("recompute_config.select_comm_recompute"),
    "recompute_config.select_recompute_exclude": decided("recompute_config.select_recompute_exclude"),
    "recompute_config.select_recompute_exclude.*": decided("recompute_config.select_recompute_exclude"),
    "recompute_config.select_comm_recompute_exclude": decided("recompute_config.select_comm_recompute_exclude"),
    "recompute_config.select_comm_recompute_exclude.*": decided("recompute_config.select_comm_recompute_exclude"),
    "recompute_config.parallel_optimizer_comm_recompute": decided("recompute_config.parallel_optimizer_comm_recompute"),
    "recompute_config.mp_comm_recompute": decided("recompute_config.mp_comm_recompute"),
    "recompute_config.recompute_slice_activation": decided("recompute_config.recompute_slice_activation"),
}
PARALLEL |= {f"moe_config.{name}": rule for name, rule in keys_below("moe_config").items()}


MODEL = "model.model_config"
LENGTHS = ("max_new_tokens", "max_decode_length")  # two names of one key
PROFILE_KEYS = ("profile_start_step", "profile_stop_step", "profile_memory", "profile_rank_ids", "with_stack")


def translate_session(reading: Reading) -> None:
    """Translate top-level keys that depend on each other, and keys of generation."""
    _mode(reading)
    key, interval = "do_eval", "eval_step_interval"
    evaluates = bool(reading.get(key))
    if reading.has(key):
        if evaluates:
            reading.refuse(key, "a part of train_dataset's files is held out here; write --do_eval=false, or ours")
        else:
            reading.use(key)
    if reading.has(interval):
        reading.idle(interval, "do_eval is off")
    for key in filter(reading.has, PROFILE_KEYS):
        if reading.get("profile"):
            reading.use(key)
        else:
            reading.idle(key, "profile is off")
    # the section generation_config takes precedence over keys of the model
    for name in WRITING:
        written = (
            next((length for length in LENGTHS if reading.has(f"{GENERATION}.{length}")), name)
            if name in LENGTHS
            else name
        )
        if reading.has(f"{GENERATION}.{written}") and reading.has(f"{MODEL}.{name}"):
            reading.idle(f"{MODEL}.{name}", f"{GENERATION}.{written} is given")
    sampled = bool(reading.get(f"{GENERATION}.do_sample", reading.get(f"{MODEL}.do_sample", True)))
    _generation_keys(reading, GENERATION, sampled)
    _generation_keys(reading, MODEL, sampled)
    if reading.has("context.deterministic"):
        reading.translate(
            "context.deterministic", "train_precision_sync", reading.get("context.deterministic") in ("ON", True)
        )


def _mode(reading: Reading) -> None:
    key = "run_mode"
    if not reading.has(key):
        return
    mode = reading.get(key)
    if mode == "finetune" and not reading.get("load_checkpoint") and not reading.get("resume_training"):
        reason = "no weights are named: --load_checkpoint gives them"
        reading.translate(key, key, "train", reason)
    elif mode == "predict_with_train_model":
        reading.translate(key, key, "predict")
    elif mode == "eval":
        reading.refuse(key, _why_not_evaluated(reading))
    else:
        reading.use(key)


def _why_not_evaluated(reading: Reading) -> str:
    metric = reading.word("metric.type")
    if metric and metric != "PerplexityMetric":
        return f"{metric} scores generated text, which is not here; mindllm evaluate has other tasks"
    return "a part of train_dataset's files is evaluated here; write --run_mode=train and do_eval"


def _generation_keys(reading: Reading, section: str, sampled: bool) -> None:
    """Translate keys of generation: sampling keys apply with ``do_sample`` only."""
    for name in ("do_sample", "temperature", "top_k", "top_p"):
        key = f"{section}.{name}"
        if not reading.is_open(key):
            continue
        if sampled:
            reading.translate(key, f"generation.{name}")
        else:
            reading.idle(key, "the most likely token is taken")
    for name in ("num_beams", "repetition_penalty"):
        key = f"{section}.{name}"
        if reading.is_open(key):
            if reading.get(key) == 1:
                reading.idle(key, "1 is none")
            else:
                reading.translate(key, f"generation.{name}")
    new, longest = (f"{section}.{name}" for name in LENGTHS)
    if reading.is_open(new):
        reading.translate(new, "generation.max_new_tokens")
    if reading.is_open(longest):
        if reading.has(new):
            reading.idle(longest, "max_new_tokens is given")
        else:
            reading.translate(longest, "generation.max_new_tokens", reason="counted without the prompt here")


OFF = "monitor_on is false"


def translate_monitor(reading: Reading) -> None:
    """Translate every key of the section: supported figures, other figures, and keys that would end a run."""
    section = reading.get(MONITOR_SECTION)
    if not isinstance(section, dict):
        return
    is_on = section.get(ON) is True
    figures = [name for name in FIGURES if is_on and section.get(name)]
    for name, value in section.items():
        key = f"{MONITOR_SECTION}.{name}"
        if name == ON:
            watches = bool(figures)
            if value is True and not watches:
                reading.translate(key, key, False, "none of the selected figures is supported")
            elif isinstance(value, bool):
                reading.use(key)
            else:
                reading.idle(key, "empty")
        elif name == INTERVAL and figures:
            reading.use(key)
        elif name == INTERVAL or (name in FIGURES and name not in figures):
            reading.idle(key, (OFF if not is_on else "none of its figures is computed") if value else "empty")
        elif name in FIGURES:
            reading.translate(key, key, value, FIGURES[name])
        elif name in OTHER_FIGURES or name in ENDING:
            _foreign_key(reading, name, value, is_on)
    if figures:
        for name in {*KEYS.values()} - {*figures}:
            reading.put(f"{MONITOR_SECTION}.{name}", None)


def _foreign_key(reading: Reading, name: str, value: object, is_on: bool) -> None:
    """Record the outcome of a key that mindllm does not have, for each key of its section."""
    is_set = is_on and any(inner_value for _, inner_value in leaves(value, (name,)))
    for path, inner_value in leaves(value, (MONITOR_SECTION, name)):
        key = ".".join(map(str, path))
        if name in ENDING and is_set and inner_value:
            reading.refuse(key, ENDING[name])
        elif not is_on:
            reading.idle(key, OFF)
        else:
            reading.idle(key, OTHER_FIGURES.get(name, "off"))
