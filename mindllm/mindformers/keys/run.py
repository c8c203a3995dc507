"""Keys of MindFormers about the run as a whole: the top level, trainer, runner_config, context, profiling, monitors.

Behind them those about distribution: parallel, parallel_config, recompute_config, moe_config.
"""

from __future__ import annotations

from mindllm.mindformers.keys.experts import keys_below
from mindllm.mindformers.keys.rules import Table, decided, idle, moved, only, used

WHOLE_PARAMETERS = "checkpoints hold whole parameters, whatever the layout they are read into"
NO_SINKING = "every step is one call of the compiled graph, there is no data sinking"
ALWAYS_SAFETENSORS = "checkpoints are safetensors; older files are read as what they are"
PIPELINE_OF_DATA = "a batch is a function of (seed, step), whatever reads it"
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
    "auto_trans_ckpt": idle(WHOLE_PARAMETERS),
    "transform_process_num": idle(WHOLE_PARAMETERS),
    "src_strategy_path_or_dir": idle(WHOLE_PARAMETERS),
    "load_ckpt_async": idle("weights are read one tensor at a time"),
    "balanced_load": idle("weights are read one tensor at a time"),
    "remove_redundancy": idle(WHOLE_PARAMETERS),
    "only_save_strategy": only(
        False,
        None,
        reason=WHOLE_PARAMETERS,
        otherwise="no strategy files are needed; mindllm dry-run compiles without a device",
    ),
    "ignore_data_skip": only(
        False, None, reason=PIPELINE_OF_DATA, otherwise="a resumed run continues with the next sample"
    ),
    "data_skip_steps": only(None, 0, reason=PIPELINE_OF_DATA, otherwise="a resumed run continues with the next sample"),
    "use_legacy": idle("one decoder stands for both kinds of networks"),
    "use_legacy_format": idle("one format of checkpoints, written whole or not at all"),
    "do_eval": decided("do_eval"),
    "eval_step_interval": decided("eval_step_interval"),
    "eval_epoch_interval": idle("eval_step_interval says when to evaluate"),
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
    "auto_tune": idle(PIPELINE_OF_DATA),
    "filepath_prefix": idle(PIPELINE_OF_DATA),
    "autotune_per_step": idle(PIPELINE_OF_DATA),
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
    "monitor_config.*": idle("it only watches; monitor_config of mindllm has figures by group of layers"),
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
    "runner_config.sink_mode": idle(NO_SINKING),
    "runner_config.sink_size": idle(NO_SINKING),
    "runner_config.per_epoch_size": idle(NO_SINKING),
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
        reason="dtypes are always those that model.model_config says",
        otherwise="dtypes are always those that model.model_config says (must_keep_origin_dtype)",
    ),
    "context.ascend_config.parallel_speed_up_json_path": idle(
        "it only overlaps communication with computing; its keys change nothing in graphs compiled here: docs/step_time.md"
    ),
    "context.ascend_config.*": idle("set by MindSpore"),
    "context.mempool_block_size": idle("MindSpore's own; max_device_memory is the limit"),
    "context.affinity_cpu_list": idle("processes are bound to no cores"),
}
NO_LAYOUT_FILES = "no layout files are needed: checkpoints hold whole parameters"
DECLARED = "strategies are declared beside the mathematics, not searched"
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
    "parallel.strategy_ckpt_save_file": idle(NO_LAYOUT_FILES),
    "parallel.strategy_ckpt_config.*": idle(NO_LAYOUT_FILES),
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
    "parallel_config.seq_split_num": only(
        1, None, reason="sequences stay whole", otherwise="sequences are not cut into pieces of a pipeline here"
    ),
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
