"""What this release runs, and what it only compiles."""

from __future__ import annotations

from mindllm.config import RunConfig
from mindllm.parallel.context import refuse_mean_gradients


def refuse_what_is_only_compiled(config: RunConfig) -> None:
    """Raises a UserError for several devices that are not replicas of the model on CPUs: such a run is compiled, not run."""
    sizes = config.parallel_config
    if sizes.device_num == 1:
        return
    compiled = "can be compiled (mindllm.compiled.compile_rank) but not run"
    if config.context.device_target != "CPU":
        raise config.error(
            "parallel_config",
            f"describes {sizes.device_num} devices; on {config.context.device_target} several devices {compiled} by this "
            "release. Write use_parallel: false and sizes of 1",
        )
    if sizes.device_num > sizes.data_parallel:
        raise config.error(
            "parallel_config",
            f"shards the model (model_parallel {sizes.model_parallel}, pipeline_stage {sizes.pipeline_stage}), which {compiled} "
            "on CPU. Write model_parallel: 1 and pipeline_stage: 1; data_parallel may be larger",
        )
    if config.parallel.enable_parallel_optimizer:
        raise config.error(
            "parallel.enable_parallel_optimizer", f"a sharded optimizer {compiled} on CPU (value true); write false"
        )
    refuse_mean_gradients(config)
