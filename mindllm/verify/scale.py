"""A configuration with a small model and the same parallelism: layers, widths, vocabulary, sequence and batch shrink.

What decides how the compiler shards is kept: the mesh (or a smaller one of its kind, ``smaller_mesh.py``), interleave, every
switch, the kinds of layers (specification and recomputation) in every place, more and fewer layers per stage, grouped queries,
what a size has in common with the number of devices, and which weights are below the parallel optimizer's threshold. Micro
batches and accumulation steps are enough to fill the pipeline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindllm.architecture.layer import LayerSpec
from mindllm.axes import CONTEXT
from mindllm.config import (
    ModelConfig,
    ParallelConfig,
    ParallelContextConfig,
    RecomputeConfig,
    RunConfig,
    keys_of_layers,
    override_config,
)
from mindllm.config.swap import SwapConfig
from mindllm.parallel.layer_plan import LayerPlan, make_plan
from mindllm.parallel.plan_text import render_plan
from mindllm.verify.smaller_mesh import PARTS, SmallerMesh

SMALLEST_RANK = 4
SMALLEST_GROUP = 4  # columns that share a scale
SMALLEST_HEADS = 4
SMALLEST_HEAD = 16
SMALLEST_LAYERS = 2
SMALLEST_VOCABULARY = 96
SMALLEST_SEQUENCE = 32
FEW_EXPERTS, FEW_CHOSEN, FEW_GROUPS = 4, 2, 2
SHARE_OF_WINDOW = 4  # of the sequence is a window long
LARGEST_BATCH = 2
TRAIN_STEPS = 10
MOST_PARTS = PARTS  # of a batch, and micro batches for every stage
BYTES = 4
KILOBYTE = 1024
STABLE_EPSILON = 1e-4
SMALLEST_DECAY = 0.1
LARGEST_NORM = 0.1  # less than any norm of the small model's gradients, so that clipping is seen


def scaled(config: RunConfig, real_dtype: bool = False, mesh: SmallerMesh | None = None) -> RunConfig:
    """The configuration that is checked in place of ``config``, on its own mesh or a smaller one.

    It computes in fp32 unless ``real_dtype``, whatever the YAML says; Adam's epsilon is large, so that gradients next to
    zero, whose sign is a matter of rounding, do not become whole updates; and every step is clipped, if the YAML clips.

    Raises:
        UserError: the configuration has contradictory lists of recomputation.
    """
    kept = kept_numbers(config, mesh)
    plan, specs = kept_plan(config, kept), tuple(config.model.config.architecture.layers[n] for n in kept)
    config = config if mesh is None else on_mesh(config, mesh)
    sizes = {**model_sizes(config), **keys_of_layers(config.model.config, specs)}
    return override_config(
        config,
        {
            **{f"model.model_config.{key}": value for key, value in sizes.items()},
            **_rank(config.model.config),
            **_group(config.model.config),
            **{key: value for key, value in render_plan(plan).items() if _matters(key, plan)},
            **({} if real_dtype else _in_fp32(config.model.config)),
            **_swapped(config, kept),
            **_optimizer(config, sizes),
            **_of_the_run(config, MOST_PARTS if mesh is None else mesh.parts),
        },
    )


def kept_numbers(config: RunConfig, mesh: SmallerMesh | None = None) -> list[int]:
    """Numbers of the layers that are kept, those of the stages of ``mesh``."""
    plan, specs = make_plan(config), config.model.config.architecture.layers
    kept = kept_layers(plan, specs, config.model.config.fine_grain_interleave > 1)
    return kept if mesh is None else [number for number in kept if plan.layers[number].stage in mesh.stages]


def kept_plan(config: RunConfig, kept: Sequence[int]) -> LayerPlan:
    """The plan of the layers that are kept, on the stages that hold one, counted from 0."""
    whole = make_plan(config)
    layers = [whole.layers[number] for number in kept]
    stages = sorted({layer.stage for layer in layers})
    return replace(
        whole,
        stages=len(stages),
        layers=tuple(replace(layer, stage=stages.index(layer.stage)) for layer in layers),
    )


def on_mesh(config: RunConfig, mesh: SmallerMesh) -> RunConfig:
    """The configuration with the sizes of a smaller mesh, unchecked: its layers are still those of the whole one."""
    shards = {"optimizer_weight_shard_size": mesh.optimizer_shards}
    optimizer = config.parallel.parallel_optimizer_config.model_copy(update=shards)
    given, rows = config.parallel.dataset_strategy, config.parallel_config.data_parallel
    strategy = given and tuple((mesh.data_parallel if first == rows else first, *rest) for first, *rest in given)
    parallel = {"parallel_optimizer_config": optimizer, "dataset_strategy": strategy}
    changed = {
        "parallel_config": mesh.sizes(config.parallel_config),
        "parallel": config.parallel.model_copy(update=parallel),
    }
    return config.model_copy(update=changed)


def _swapped(config: RunConfig, kept: Sequence[int]) -> dict[str, Any]:
    """The layers that ``swap_config`` numbers, by their places among those that are ``kept``."""
    found: dict[str, Any] = {}
    for key in ("layer_swap", "op_swap"):
        if named := getattr(config.swap_config, key):
            places = [[at for at, number in enumerate(kept) if one.holds(number)] for one in named]
            found[f"swap_config.{key}"] = [
                {**one.model_dump(), "layers": held} for one, held in zip(named, places, strict=True)
            ]
    return found


def _rank(model: ModelConfig) -> dict[str, Any]:
    """A rank of adapters that is below every width of the small model."""
    if model.pet_config is None or not (key := model.pet_config.tuner.width):
        return {}
    return {f"model.model_config.pet_config.{key}": min(getattr(model.pet_config, key), SMALLEST_RANK)}


def _group(model: ModelConfig) -> dict[str, Any]:
    """Groups of columns in codes that the small model can be divided by; rows that are one group stay so."""
    section = model.quantization_config
    if section is None or not section.group_size:
        return {}
    return {"model.model_config.quantization_config.group_size": min(section.group_size, SMALLEST_GROUP)}


def single_device(config: RunConfig) -> RunConfig:
    """The same model and global batch on one CPU, without stages or recomputation.

    The batch is computed at once, unless the loss depends on which sequences are: the balance loss ``switch`` is that of a
    micro batch. Parts of a batch are consecutive rows here and on a cluster, whatever devices have of it.
    """
    model = config.model.config
    parts = _parts_of_a_batch(config) if model.expert_num > 1 and "switch" in model.aux_loss_types else 1
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


def _parts_of_a_batch(config: RunConfig) -> int:
    """Parts of a global batch that are computed one after another, or as copies beside each other."""
    sizes, runner = config.parallel_config, config.runner_config
    return sizes.micro_batch_num * runner.gradient_accumulation_steps * config.micro_batch_interleave_num


def kept_layers(plan: LayerPlan, specs: Sequence[LayerSpec], ends_differ: bool = False) -> list[int]:
    """Numbers of as few layers as show what ``plan`` has: every kind of layer of every place, in order, and uneven stages.

    A kind is a specification and a recomputation, and where ``ends_differ`` whether it is the model's first or last layer.
    Numbers may repeat, but for those of layers that predict ahead, which stay the last ones.
    """
    ends = (0, len(specs) - 1) if ends_differ else ()
    ahead = {number for number, spec in enumerate(specs) if spec.is_mtp}
    counts = sorted({count for row in plan.counts for count in row})
    kept: list[int] = []
    for chunk, stage in itertools.product(range(plan.chunks), range(plan.stages)):
        place = [n for n, layer in enumerate(plan.layers) if (layer.chunk, layer.stage) == (chunk, stage)]
        kinds: dict[Hashable, int] = {}
        for number in place:
            end = number if number in ends else None
            kinds.setdefault((end, plan.layers[number].kind(specs[number])), number)
        at_least = min(len(place), SMALLEST_LAYERS) if plan.stages == 1 else 1
        first_of_each = [number for number in kinds.values() if number not in ahead]
        last = [number for number in place if number in ahead]
        wanted = at_least + counts.index(len(place)) - len(last)
        kept += first_of_each + first_of_each[-1:] * (wanted - len(first_of_each)) + last
    return kept


def model_sizes(config: RunConfig) -> dict[str, Any]:
    """Small values of the keys of ``model_config`` that are widths or lengths."""
    model, sizes = config.model.config, config.parallel_config
    tensor, devices = sizes.model_parallel, sizes.stage_device_num
    sharing = min(2, model.num_heads // model.n_kv_heads)
    kv_heads = _multiple(SMALLEST_HEADS // sharing, tensor * (sizes.size(CONTEXT) if sizes.exchanges_heads else 1))
    heads = kv_heads * sharing
    head_dim, hidden = _widths(heads, model.hidden_size, devices)
    sequence = _multiple(SMALLEST_SEQUENCE, math.lcm(model.loss_chunks, 2, tensor) * sizes.size(CONTEXT))
    return {
        "num_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "ffn_dim_multiplier": None,
        "intermediate_size": _inner_width(model, hidden, devices),
        "vocab_size": _alike(model.vocab_size, SMALLEST_VOCABULARY, devices),
        "seq_length": sequence,
        "max_position_embedding": sequence,
        **_of_positions(model, sequence, head_dim),
        **(_of_latent_attention(model, heads, hidden) if model.kv_lora_rank is not None else {}),
        **(_of_experts(model, hidden, devices) if model.expert_num > 1 else {}),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _of_positions(model: ModelConfig, sequence: int, head_dim: int) -> dict[str, Any]:
    """Windows shorter than the small sequence; pairs of channels that partial rotary positions can turn."""
    rotated = 2 * round(head_dim * model.partial_rotary_factor / 2)
    return {
        **({} if model.sliding_window is None else {"sliding_window": sequence // SHARE_OF_WINDOW}),
        **({} if model.partial_rotary_factor == 1 else {"partial_rotary_factor": rotated / head_dim}),
    }


def _of_latent_attention(model: ModelConfig, heads: int, hidden: int) -> dict[str, Any]:
    """Narrow vectors and heads whose parts have other widths, as the real ones have."""
    plain, turned = SMALLEST_HEAD - SMALLEST_HEAD // 4, SMALLEST_HEAD // 2
    return {
        "n_kv_heads": heads,
        "head_dim": plain + turned,
        "q_lora_rank": None if model.q_lora_rank is None else hidden // 2,
        "kv_lora_rank": hidden // 4,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": turned,
        "v_head_dim": plain if model.v_head_dim == model.qk_nope_head_dim else plain - 2,
    }


def _of_experts(model: ModelConfig, hidden: int, devices: int) -> dict[str, Any]:
    """A few experts, shared by devices as the real ones are, two groups of them where there are groups, and narrow ones."""
    narrow, shared = model.moe_intermediate_size, model.moe_shared_expert_intermediate_size
    groups = min(model.n_group, FEW_GROUPS)
    number = next(
        count
        for count in itertools.count(FEW_EXPERTS)
        if count % groups == 0 and math.gcd(count, devices) == math.gcd(model.expert_num, devices)
    )
    as_dense = narrow == model.intermediate_size
    width = _inner_width(model, hidden, devices) if as_dense else _alike(narrow, hidden // 2, devices)
    return {
        "expert_num": number,
        "num_experts_chosen": min(model.num_experts_chosen, FEW_CHOSEN),
        "n_group": groups,
        "topk_group": groups if model.topk_group == model.n_group else 1,
        "moe_intermediate_size": width,
        **({} if shared is None else {"moe_shared_expert_intermediate_size": _alike(shared, hidden // 2, devices)}),
    }


def _widths(heads: int, hidden_size: int, devices: int) -> tuple[int, int]:
    """Width of a head and of the hidden states, the latter as divisible by ``devices`` as ``hidden_size`` is."""
    wanted = math.gcd(hidden_size, devices)
    head_dim = next(
        (
            width
            for width in range(SMALLEST_HEAD, SMALLEST_HEAD + 2 * devices + 2, 2)
            if math.gcd(heads * width, devices) == wanted
        ),
        SMALLEST_HEAD,
    )
    return head_dim, heads * head_dim


def _inner_width(model: ModelConfig, hidden: int, devices: int) -> int:
    """Width of the feed-forward: four times the hidden states' where it is that (families that say no width have no other)."""
    if model.intermediate_size == 4 * model.hidden_size:
        return 4 * hidden
    return _alike(model.intermediate_size, hidden + hidden // 2, devices)


def _alike(size: int, smallest: int, devices: int) -> int:
    """The smallest number from ``smallest`` on that has the same divisors in common with ``devices`` as ``size``."""
    wanted = math.gcd(size, devices)
    return next(number for number in itertools.count(smallest) if math.gcd(number, devices) == wanted)


def _multiple(smallest: int, of: int) -> int:
    return math.ceil(smallest / of) * of


def _matters(key: str, plan: LayerPlan) -> bool:
    """Lists of the pipeline are for pipelines."""
    return plan.stages > 1 or not key.startswith(("model.", "parallel_config."))


def _in_fp32(model: ModelConfig) -> Mapping[str, Any]:
    keys = ["compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype"]
    if model.pet_config is not None and model.pet_config.frozen_dtype != "float32":
        keys.append("pet_config.frozen_dtype")
    return {f"model.model_config.{key}": "float32" for key in keys}


def _optimizer(config: RunConfig, sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the update: clipping that takes place if there is any; small norms are whole if the real ones are."""
    key = "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
    threshold = config.parallel.parallel_optimizer_config.parallel_optimizer_threshold
    norms_are_whole = config.model.config.hidden_size * BYTES < threshold * KILOBYTE
    smallest_norm = sizes["hidden_size"] * BYTES // KILOBYTE + 1
    return {
        "optimizer.eps": STABLE_EPSILON,
        "optimizer.weight_decay": config.optimizer.weight_decay and max(config.optimizer.weight_decay, SMALLEST_DECAY),
        "runner_wrapper.max_grad_norm": min(config.runner_wrapper.max_grad_norm, LARGEST_NORM),
        **({key: smallest_norm if norms_are_whole else 0} if config.parallel.enable_parallel_optimizer else {}),
    }


def _of_the_run(config: RunConfig, parts: int) -> Mapping[str, Any]:
    """Nothing is read or written, and batches are small."""
    copies, schedule = config.micro_batch_interleave_num, config.lr_schedule
    warmup = schedule.warmup_steps if schedule is not None else None
    return {
        "run_mode": "train",
        "load_checkpoint": "",
        "pretrained_model_dir": "",
        "resume_training": False,
        "do_eval": False,
        "runner_config.batch_size": min(config.runner_config.batch_size, LARGEST_BATCH * copies),
        "runner_config.train_steps": TRAIN_STEPS,
        **({} if warmup is None else {"lr_schedule.warmup_steps": min(warmup, TRAIN_STEPS)}),
        "runner_config.gradient_accumulation_steps": min(config.runner_config.gradient_accumulation_steps, MOST_PARTS),
        "parallel_config.micro_batch_num": _micro_batches(config, parts),
    }


def _micro_batches(config: RunConfig, parts: int) -> int:
    """Enough of them to fill the pipeline, ``parts`` times; what remains when the stages share them stays."""
    sizes = config.parallel_config
    most = parts * sizes.pipeline_stage
    count = sizes.micro_batch_num
    return count if count <= most else most + count % sizes.pipeline_stage
