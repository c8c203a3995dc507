"""Settings of MindSpore's parallel compiler before a graph is built, from sections ``parallel`` and ``parallel_config``.

A model also creates its own groups of ranks, and the operators that communicate in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.communication import create_group
from mindspore.ops import Primitive

from mindllm.config import RunConfig
from mindllm.config.checks.mesh import device_count_error
from mindllm.parallel.layout import GROUP_RANKS, mesh_of, model_group_name
from mindllm.random_keys import RANDOM_KEYS

_created: set[str] = set()
COLUMNS = ("input_ids", "labels", "loss_mask")
"""The columns of every batch."""
DOCUMENT_COLUMNS = ("segment_starts", "position_ids")


def group_of(ranks: Sequence[int]) -> str:
    """Return the name of the group of these ranks, which include this one. The group is created at first use."""
    name = model_group_name(ranks)
    if name not in _created:
        create_group(name, list(ranks))
        _created.add(name)
    return name


def mark_ranks(operator: Primitive, ranks: Sequence[int]) -> None:
    """Attach the ranks of its group to an operator, for readers of the compiled graph."""
    operator.add_prim_attr(GROUP_RANKS, list(ranks))


def in_group(kind: type[Primitive], ranks: Sequence[int], **options: str) -> Primitive:
    """Return an operator of this kind, with these options, that communicates with these ranks, which include this one."""
    operator = kind(group=group_of(ranks), **options)
    mark_ranks(operator, ranks)
    return operator


def input_columns(config: RunConfig) -> tuple[str, ...]:
    """Return the columns of the graphs of a run on several devices, including those for evaluation."""
    documents = DOCUMENT_COLUMNS if config.uses_position_ids else ()
    random = (RANDOM_KEYS,) if config.model.config.architecture.drops else ()
    return (*COLUMNS, *documents, *random)


def set_parallel_context(config: RunConfig, rank: int, tell_rank: bool = True) -> None:
    """Sets MindSpore's parallel context for ``rank``. On one device nothing is set.

    Without ``tell_rank`` the compiler asks for the rank when it wants to know (``mindllm/compiled/device/front_end.py``).

    Raises:
        UserError: a value the compiler accepts and that would make gradients wrong.
    """
    mesh = mesh_of(config)
    if mesh.device_num > 1:
        check_context(config)
        keywords = parallel_context(config, rank)
        if not tell_rank:
            del keywords["global_rank"]
        ms.set_auto_parallel_context(**keywords)


def check_context(config: RunConfig) -> None:
    """Raise UserError for unsupported steps, and for numbers of devices that the compiler does not support."""
    if message := device_count_error(config):
        raise config.error("parallel_config.data_parallel", message)
    if config.parallel.parallel_mode == 0:
        advice = "write semi_auto_parallel: with model_parallel and pipeline_stage 1 it is data parallelism"
        raise config.error(
            "parallel.parallel_mode", f"not available for several devices (value data_parallel); {advice}"
        )
    refuse_mean_gradients(config)
    pipeline = config.parallel.pipeline_config
    if pipeline.pipeline_scheduler != "1f1b" and not pipeline.pipeline_interleave:
        key, value = "parallel.pipeline_config.pipeline_scheduler", pipeline.pipeline_scheduler
        raise config.error(key, f"needs parallel.pipeline_config.pipeline_interleave: true (value {value})")
    _check_accumulators(config)


def refuse_mean_gradients(config: RunConfig) -> None:
    """Raises a UserError where gradients would be divided twice."""
    if config.parallel.gradients_mean:
        reason = "gradients are sums over tokens, divided by the number of tokens of the whole batch"
        raise config.error(
            "parallel.gradients_mean", f"would divide gradients twice (value true); {reason}; write false"
        )


def _check_accumulators(config: RunConfig) -> None:
    """Raise UserError if sharded accumulators are unsupported here."""
    gather_again = "recompute_config.parallel_optimizer_comm_recompute"
    shard = "parallel.parallel_optimizer_config.gradient_accumulation_shard"
    if optimizer_level(config) == "level3" and config.parallel_config.pipeline_stage > 1:
        advice = f"write false, and {shard}: true to shard accumulated gradients"
        raise config.error(
            gather_again, f"MindSpore cannot compile it for several pipeline stages (value true); {advice}"
        )
    if not config.parallel.parallel_optimizer_config.gradient_accumulation_shard:
        return
    if optimizer_level(config) == "level3":
        raise config.error(gather_again, f"shards accumulated gradients as well (value true); remove {shard}")
    if config.parallel_config.pipeline_stage == 1 and config.runner_config.gradient_accumulation_steps > 1:
        raise config.error(shard, f"needs a pipeline (value true); without one write {gather_again}: true instead")


def parallel_context(config: RunConfig, rank: int) -> dict[str, Any]:
    """Keywords of ``mindspore.set_auto_parallel_context``."""
    mesh, parallel = mesh_of(config), config.parallel
    pipeline = parallel.pipeline_config
    keywords: dict[str, Any] = {
        "parallel_mode": "semi_auto_parallel",
        "device_num": mesh.device_num,
        "global_rank": rank,
        "pipeline_stages": mesh.pipeline_stage,
        "gradients_mean": False,
        "enable_parallel_optimizer": parallel.enable_parallel_optimizer,
        "pipeline_config": {
            "pipeline_interleave": pipeline.pipeline_interleave,
            "pipeline_scheduler": pipeline.pipeline_scheduler,
        },
        **_inputs(config),
    }
    if pipeline.v_shape:
        keywords["pipeline_segments"] = config.model.config.pp_interleave_num
    if config.parallel_config.expert_parallel > 1 or config.parallel_config.shares_sequences:
        keywords["enable_alltoall"] = True  # otherwise exchanged tensors are gathered on all devices and sliced
    if parallel.enable_parallel_optimizer:
        keywords["parallel_optimizer_config"] = _parallel_optimizer(config)
    if parallel.strategy_ckpt_save_file:
        keywords["strategy_ckpt_config"] = {"save_file": str(_of_rank(Path(parallel.strategy_ckpt_save_file), rank))}
    return keywords


def _inputs(config: RunConfig) -> dict[str, Any]:
    """Either the whole global batch, or slices of it, by default along the batch over data parallel."""
    if config.parallel.full_batch:
        return {"full_batch": True}
    along_batch = ((config.parallel_config.data_parallel, 1),) * len(input_columns(config))
    return {"dataset_strategy": config.parallel.dataset_strategy or along_batch}


def _parallel_optimizer(config: RunConfig) -> dict[str, Any]:
    options = config.parallel.parallel_optimizer_config
    return {
        "parallel_optimizer_threshold": options.parallel_optimizer_threshold,
        "optimizer_weight_shard_size": options.optimizer_weight_shard_size,
        "optimizer_level": optimizer_level(config),
    }


def optimizer_level(config: RunConfig) -> str:
    """Return MindSpore's level of sharding: optimizer state, additionally accumulated gradients, additionally weights between
    uses.

    The last one gathers weights again in the backward pass, as ``parallel_optimizer_comm_recompute`` requests.
    """
    if config.recompute_config.parallel_optimizer_comm_recompute:
        return "level3"
    return "level2" if config.parallel.parallel_optimizer_config.gradient_accumulation_shard else "level1"


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}_rank_{rank}{path.suffix}")
