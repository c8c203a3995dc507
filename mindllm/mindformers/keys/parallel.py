"""Keys of MindFormers about distribution: parallel, parallel_config, recompute_config, moe_config."""

from __future__ import annotations

from mindllm.mindformers.keys.experts import keys_below
from mindllm.mindformers.keys.rules import Table, decided, idle, only, used

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
