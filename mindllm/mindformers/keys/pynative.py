"""Keys of the PyNative form, MindFormers 2.x: its sections, and what each key is in the form of static graphs.

The meanings are those of MindFormers' own page (``feature/configuration.md`` of r2.10.0). What stands in :data:`RENAMED` is moved
to its place in the other form, and translated there; the rows of :data:`PYNATIVE` say what becomes of the others.
"""

from __future__ import annotations

from mindllm.mindformers.keys.monitor import PYNATIVE_MONITOR
from mindllm.mindformers.keys.rules import Table, decided, idle, only
from mindllm.mindformers.keys.update import UPDATE

SECTIONS = ("training", "parallelism", "lr_scheduler", "checkpoint")
"""Sections that only this form has."""
ONE_FILE = "a checkpoint is written once, whole parameters with the optimizer's state, below output_dir"
HIDING = "it only hides exchanges behind computing"
GATHERED = (
    "weights are gathered before they are used and kept until the backward pass, unless "
    "recompute_config.parallel_optimizer_comm_recompute is true, which gathers them again as FSDP does"
)
SUMS = "gradients are sums over tokens, divided once by the tokens of the global batch"

RENAMED = {
    "training.seed": "seed",
    "training.local_batch_size": "runner_config.batch_size",
    "training.max_norm": "runner_wrapper.max_grad_norm",
    "parallelism.tensor_parallel": "parallel_config.model_parallel",
    "parallelism.pipeline_parallel": "parallel_config.pipeline_stage",
    "parallelism.context_parallel": "parallel_config.context_parallel",
    "parallelism.context_parallel_method": "parallel_config.context_parallel_algo",
    "parallelism.ulysses_degree_in_cp": "parallel_config.ulysses_degree_in_cp",
    "parallelism.expert_parallel": "parallel_config.expert_parallel",
    "parallelism.pipeline_parallel_schedule": "parallel.pipeline_config.pipeline_scheduler",
    "parallelism.pipeline_parallel_interleave_num": "model.model_config.pp_interleave_num",
    "parallelism.moe_token_dispatcher_type": "model.model_config.moe_token_dispatcher_type",
    "profiler.enable_profiling": "profile",
    "profiler.start_step": "profile_start_step",
    "profiler.end_step": "profile_stop_step",
    "profiler.profile_memory": "profile_memory",
    "profiler.with_stack": "with_stack",
    "profiler.profiler_rank": "profile_rank_ids",
}
"""Keys that mean the same in both forms, and where they stand in the other."""
DERIVED = {
    "training.global_batch_size": "runner_config.gradient_accumulation_steps",
    "parallelism.data_parallel_shard": "parallel_config.data_parallel",
    "parallelism.pipeline_parallel_layers_per_stage": "model.model_config.offset",
    "recompute.full_recompute_layer": "recompute_config.recompute",
    "checkpoint.load_path": "load_checkpoint",
    "checkpoint.no_load_optim": "resume_training",
    "checkpoint.save_interleaved_steps": "callbacks.CheckpointMonitor.save_checkpoint_steps",
    "checkpoint.save_max": "callbacks.CheckpointMonitor.keep_checkpoint_max",
    "checkpoint.async_save": "callbacks.CheckpointMonitor.async_save",
}
"""Keys whose value in the other form follows from others too."""

PYNATIVE: Table = {
    **{key: decided(target) for key, target in (RENAMED | DERIVED).items()},
    **{f"lr_scheduler.{key.partition('.')[2]}": decided(key) for key in UPDATE if key.startswith("lr_schedule.")},
    "training.steps": decided("runner_config.train_steps"),
    "training.deterministic": decided("train_precision_sync"),
    "parallelism.data_parallel_shard_strategy": idle("weights, gradients and optimizer state are all shared"),
    "parallelism.reshard_after_forward_policy": idle(GATHERED),
    "parallelism.cpu_offload": only(
        False, None, reason="off", otherwise="weights stay on the device; write swap_config for activations"
    ),
    "parallelism.disable_gradient_division": idle(SUMS),
    "parallelism.sequence_parallel": idle("it is on wherever tensor_parallel is above 1, whatever is written"),
    "parallelism.context_parallel_async": idle(HIDING),
    "parallelism.context_parallel_mask_type": only(
        "causal", None, reason="masks are causal", otherwise="masks are causal here"
    ),
    "parallelism.pipeline_parallel_overlap_p2p": idle(HIDING),
    "parallelism.pipeline_parallel_overlap_b_f": idle(HIDING),
    "parallelism.pipeline_parallel_enable_dxdw_split": only(
        False,
        None,
        reason="a backward pass is whole",
        otherwise="MindSpore's static graph has no backward pass in two parts; write false",
    ),
    "parallelism.npu_nums_per_device": idle("the description of the device has its links"),
    "checkpoint.enable_save": decided("callbacks"),
    "checkpoint.save_path": idle("checkpoints stand in output_dir/checkpoint"),
    "checkpoint.prefix": idle("checkpoints are named llm-STEP"),
    "checkpoint.no_save_optim": idle(ONE_FILE),
    "checkpoint.remove_redundancy": idle(ONE_FILE),
    "checkpoint.load_balanced": idle("weights are read one tensor at a time"),
    "checkpoint.load_worker_number": idle("weights are read one tensor at a time"),
    "checkpoint.save_global_layout_cache": idle(ONE_FILE),
    "recompute.mode": decided("recompute_config.recompute"),
    "recompute.select_module": decided("recompute_config.select_recompute"),
    "recompute.select_module.*": decided("recompute_config.select_recompute"),
    "recompute_comm.enable": only(
        False,
        None,
        reason="off",
        otherwise="modules have other names here; write recompute_config.select_comm_recompute",
    ),
    "recompute_comm.select_module": idle("enable is false"),
    "recompute_comm.select_module.*": idle("enable is false"),
    "swap.enable": only(False, None, reason="off", otherwise="modules have other names here; write swap_config"),
    "swap.default_prefetch": idle("enable is false"),
    "swap.layer_swap": idle("enable is false"),
    "swap.layer_swap.*": idle("enable is false"),
    "swap.op_swap": idle("enable is false"),
    "swap.op_swap.*": idle("enable is false"),
    "profiler.output_path": idle("profiles stand in output_dir/profile"),
    "profiler.profiler_level": idle("the profile is that of level 1, which has shapes"),
    "profiler.mstx": idle("the profile is that of level 1, which has shapes"),
    "profiler.profile_cpu": idle("the profile is that of level 1, which has shapes"),
    **PYNATIVE_MONITOR,
    "optimizer.weight_decay_include": only(
        None, reason="none", otherwise="matrices are decayed, vectors are not; write null"
    ),
    "optimizer.weight_decay_exclude": only(
        None, reason="none", otherwise="matrices are decayed, vectors are not; write null"
    ),
}
