"""A run reduced to a small model with the same parallelism: layers, widths, vocabulary, sequence and batch shrink.

What decides how the compiler shards is kept: the mesh (or a smaller one of its kind, ``mesh.py``), interleave, every
switch, the kinds of layers in every place, more and fewer layers per stage, grouped queries,
what a size has in common with the number of devices, and which weights are below the parallel optimizer's threshold. Micro
batches and accumulation steps are enough to fill the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindllm.config import (
    ModelConfig,
    ParallelConfig,
    ParallelContextConfig,
    RecomputeConfig,
    RunConfig,
    override_config,
)
from mindllm.config.recompute import SwapConfig
from mindllm.parallel.layer_plan import LayerPlan
from mindllm.parallel.plan_text import render_plan
from mindllm.reduced_runs.layers import kept_layers, kept_plan, layer_keys
from mindllm.reduced_runs.mesh import PARTS, ReducedMesh, reduce_mesh
from mindllm.reduced_runs.sizes import reduced_sizes

SMALLEST_RANK = 4
SMALLEST_GROUP = 4  # columns that share a scale
LARGEST_BATCH = 2
TRAIN_STEPS = 10
ACCUMULATION_STEPS = 2
"""The most accumulation steps of a check: a third one makes it about a quarter longer."""
BYTES = 4
KILOBYTE = 1024
STABLE_EPSILON = 1e-4
SMALLEST_DECAY = 0.1
LARGEST_NORM = 0.1  # less than any norm of the small model's gradients, so that clipping takes effect
OF_HALVES = ("optimizer.master_weights", "optimizer.accumulate_in_float32")
"""Keys that apply only to parameters in half precision."""
LARGEST_LOGIT = 0.1  # less than that of most heads of the small model, so that QK-clip takes effect
MOST_IN_SMALL_BLOCK = 16  # numbers of a block of moments in codes


def reduce_model(
    config: RunConfig,
    real_dtype: bool = False,
    mesh: ReducedMesh | None = None,
    accumulation_steps: int = ACCUMULATION_STEPS,
) -> RunConfig:
    """Return the configuration that is checked instead of ``config``, on its own mesh or a smaller one.

    It computes in fp32 unless ``real_dtype``. Adam's epsilon is large, so that gradients near zero, whose sign is rounding
    noise, do not become whole updates. Every step is clipped if the YAML clips, and so are logits of heads. At most
    ``accumulation_steps`` remain.

    Raises:
        UserError: the configuration has contradictory lists of recomputation.
    """
    kept = kept_layers(config, None if mesh is None else mesh.stages)
    plan, specs = kept_plan(config, kept), tuple(config.model.config.architecture.layers[n] for n in kept)
    config = config if mesh is None else reduce_mesh(config, mesh)
    sizes = reduced_sizes(config)
    return override_config(
        config,
        {
            **{f"model.model_config.{key}": value for key, value in sizes.items()},
            **layer_keys(config.model.config, specs),
            **_rank(config.model.config),
            **_group(config.model.config),
            **{key: value for key, value in render_plan(plan).items() if _matters(key, plan)},
            **({} if real_dtype else _in_fp32(config.model.config)),
            **({} if real_dtype else {key: False for key in OF_HALVES if getattr(config.optimizer, key.split(".")[1])}),
            **_swapped(config, kept),
            **_optimizer(config, sizes),
            **_run_keys(config, PARTS if mesh is None else mesh.parts, accumulation_steps),
        },
    )


def _swapped(config: RunConfig, kept: Sequence[int]) -> dict[str, Any]:
    """Return the layers of ``swap_config`` as indices into the ``kept`` ones."""
    keys: dict[str, Any] = {}
    for key in ("layer_swap", "op_swap"):
        if named := getattr(config.swap_config, key):
            places = [[at for at, number in enumerate(kept) if group.holds(number)] for group in named]
            keys[f"swap_config.{key}"] = [
                {**group.model_dump(), "layers": layers} for group, layers in zip(named, places, strict=True)
            ]
    return keys


def _rank(model: ModelConfig) -> dict[str, Any]:
    """Return a rank of adapters below every width of the small model."""
    if model.pet_config is None or not (key := model.pet_config.tuner.width):
        return {}
    return {f"model.model_config.pet_config.{key}": min(getattr(model.pet_config, key), SMALLEST_RANK)}


def _group(model: ModelConfig) -> dict[str, Any]:
    """Return groups of columns that divide the small model; rows that are one group stay so."""
    section = model.quantization_config
    if section is None or not section.group_size:
        return {}
    return {"model.model_config.quantization_config.group_size": min(section.group_size, SMALLEST_GROUP)}


def single_device(config: RunConfig) -> RunConfig:
    """Return the run of the same model and global batch on one CPU, without stages or recomputation.

    The batch is computed as a whole, unless the loss depends on its parts: the balance loss ``switch`` is per micro-batch,
    and so is the distance from the reference that rewards unpaired answers. Parts of a batch are consecutive rows here and
    on a cluster, however devices share it.
    """
    model = config.model.config
    by_part = model.expert_num > 1 and "switch" in model.aux_loss_types
    by_part = by_part or (config.is_preference_tuning and config.preference.estimates_divergence)
    parts = _batch_parts(config) if by_part else 1
    return override_config(
        config,
        {
            "use_parallel": False,
            "context.device_target": "CPU",
            "context.enable_graph_kernel": False,
            "context.compile_cache": False,
            "parallel_config": ParallelConfig().model_dump(),
            "parallel": ParallelContextConfig().model_dump(),
            "recompute_config": RecomputeConfig().model_dump(),
            "swap_config": SwapConfig().model_dump(),
            "runner_config.batch_size": config.global_batch_size // parts,
            "runner_config.gradient_accumulation_steps": parts,
            "micro_batch_interleave_num": 1,
            "model.model_config.pp_interleave_num": 1,
            "model.model_config.fine_grain_interleave": 1,
            "model.model_config.offset": 0,
        },
    )


def _batch_parts(config: RunConfig) -> int:
    """Return the parts of a global batch that are computed sequentially, or as parallel copies."""
    sizes, runner = config.parallel_config, config.runner_config
    return sizes.micro_batch_num * runner.gradient_accumulation_steps * config.micro_batch_interleave_num


def _matters(key: str, plan: LayerPlan) -> bool:
    """Return True unless a list is for pipelines and the plan has none."""
    return plan.stages > 1 or not key.startswith(("model.", "parallel_config."))


def _in_fp32(model: ModelConfig) -> Mapping[str, Any]:
    keys = ["compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype", "param_init_type"]
    if model.pet_config is not None and model.frozen_dtype != "float32":
        keys.append("pet_config.frozen_dtype")
    return {f"model.model_config.{key}": "float32" for key in keys}


def _optimizer(config: RunConfig, sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings of the update: clipping takes effect if there is any; small norms are whole if the real ones are."""
    key = "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
    threshold = config.parallel.parallel_optimizer_config.parallel_optimizer_threshold
    logit = config.optimizer.qk_clip_threshold
    whole_norms = config.model.config.hidden_size * BYTES < threshold * KILOBYTE
    smallest_norm = sizes["hidden_size"] * BYTES // KILOBYTE + 1
    return {
        "optimizer.eps": STABLE_EPSILON,
        "optimizer.weight_decay": _visible(config.optimizer.weight_decay),
        "optimizer.weight_decay_groups": [
            {**group.model_dump(), "weight_decay": _visible(group.weight_decay)}
            for group in config.optimizer.weight_decay_groups
        ],
        **({"optimizer.state_block_size": _small_block(config, sizes)} if config.optimizer.block else {}),
        **({} if logit is None else {"optimizer.qk_clip_threshold": min(logit, LARGEST_LOGIT)}),
        "runner_wrapper.max_grad_norm": min(config.runner_wrapper.max_grad_norm, LARGEST_NORM),
        **({key: smallest_norm if whole_norms else 0} if config.parallel.enable_parallel_optimizer else {}),
    }


def _small_block(config: RunConfig, sizes: Mapping[str, Any]) -> int:
    """Return the numbers of a block of moments that small parts of small weights hold whole, as real parts hold real blocks."""
    heads = sizes["num_heads"], sizes["n_kv_heads"]
    widths = [sizes["hidden_size"], sizes["intermediate_size"], *(sizes["head_dim"] * count for count in heads)]
    return math.gcd(MOST_IN_SMALL_BLOCK, *(width // config.parallel_config.model_parallel for width in widths))


def _visible(decay: float) -> float:
    """Return a decay with a visible effect in a few steps; 0 stays 0."""
    return decay and max(decay, SMALLEST_DECAY)


def _run_keys(config: RunConfig, parts: int, accumulation_steps: int) -> Mapping[str, Any]:
    """Return keys of a run with small batches that reads and writes nothing."""
    copies, schedule = config.micro_batch_interleave_num, config.lr_schedule
    warmup = schedule.warmup_steps if schedule is not None else None
    return {
        "resume_training": False,
        "do_eval": False,
        "runner_config.batch_size": min(config.runner_config.batch_size, LARGEST_BATCH * copies),
        "runner_config.train_steps": TRAIN_STEPS,
        **({} if warmup is None else {"lr_schedule.warmup_steps": min(warmup, TRAIN_STEPS)}),
        "grouped_lr_schedule.grouped": [
            group.model_dump() | ({"warmup_steps": min(group.warmup_steps, TRAIN_STEPS)} if group.warmup_steps else {})
            for group in config.grouped_lr_schedule.grouped
        ],
        "runner_config.gradient_accumulation_steps": min(
            config.runner_config.gradient_accumulation_steps, accumulation_steps
        ),
        "parallel_config.micro_batch_num": _micro_batches(config, parts),
    }


def _micro_batches(config: RunConfig, parts: int) -> int:
    """Return enough micro-batches to fill the pipeline, ``parts`` times, with the same remainder per stage."""
    sizes = config.parallel_config
    most = parts * sizes.pipeline_stage
    count = sizes.micro_batch_num
    return count if count <= most else most + count % sizes.pipeline_stage
