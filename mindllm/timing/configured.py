"""The workload of a run YAML."""

from __future__ import annotations

from dataclasses import replace

from mindllm.axes import keys_of
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import make_plan
from mindllm.timing.costs.work import size_of
from mindllm.timing.workload import Numerics, Strategy, UpdateRule, Workload


def mindformers_workload(config: RunConfig) -> Workload | None:
    """The same where MindFormers itself runs the YAML that ``config`` was read from; None where it was none of MindFormers.

    Five things differ. Unless ``use_attn_mask_compression`` is true, the kernel of attention is given a mask of every pair of
    tokens (``sparse_mode`` 0, ``llama_transformer.py`` of r1.3.0), where ours is always compressed. That kernel takes ALiBi's
    bias, where ours is composed. A
    kernel draws and applies dropout (``nn.Dropout``), where ours is drawn in the graph. And unless ``jit_level`` is O0 or O1, a
    graph engine compiles the step (O2) and is taken to make one kernel of casts, mask and softmax: published speeds of composed
    attention say so (docs/benchmarks/published_yamls.md). At O1 and O2 the update of a weight in half precision is one kernel
    with its casts.

    Raises:
        UserError: the run has something that is not modelled.
    """
    keys = config.mindformers_keys
    if keys is None:
        return None
    workload = workload_of(config)
    said = {
        key.rpartition(".")[2]: value
        for key, value in keys.items()
        if key.startswith(("model.model_config.", "model.", "context."))
    }
    fused = workload.numerics.fused_attention or said.get("use_flash_attention") is True
    numerics = replace(
        workload.numerics,
        fused_attention=fused,
        reads_masks=fused and said.get("use_attn_mask_compression") is not True,
        takes_bias=True,
        dropout="kernel",
        plain_softmax=said.get("jit_level") in ("O0", "O1"),
    )
    update = replace(workload.update, fuses_casts=said.get("jit_level") != "O0")
    return replace(workload, numerics=numerics, update=update)


def workload_of(config: RunConfig, on_cpu: bool = False) -> Workload:
    """What the model of time is told of a run; ``on_cpu``: on a device whose attention is composed, in blocks of rows.

    Raises:
        UserError: the run has something that is not modelled.
    """
    sizes, model, runner = config.parallel_config, config.model.config, config.runner_config
    options, update = config.parallel.parallel_optimizer_config, config.optimizer
    shared = options.optimizer_weight_shard_size
    strategy = Strategy(
        **keys_of(sizes),
        micro_batches=sizes.micro_batch_num,
        micro_batch_size=runner.batch_size,
        accumulation=runner.gradient_accumulation_steps,
        sequence_parallel=sizes.use_seq_parallel and sizes.model_parallel > 1,
        optimizer_shard=config.parallel.enable_parallel_optimizer,
        vocabulary_parallel=not sizes.vocab_emb_dp,
        repeat_exchanges=config.recompute_config.mp_comm_recompute,
        copies=config.micro_batch_interleave_num,
        row_parts=model.fine_grain_interleave,
        exchanges_heads=sizes.exchanges_heads,
        context_balanced=sizes.context_parallel_balanced,
        passes_keys=sizes.passes_keys,
        schedule=config.parallel.pipeline_config.pipeline_scheduler,
        pieces=sizes.seq_split_num,
        optimizer_ranks=shared if shared > 0 else None,
        accumulators_shard=options.gradient_accumulation_shard,
        slices_inputs=config.recompute_config.recompute_slice_activation,
    )
    computes_it = all(spec.attention.can_be_fused for spec in model.architecture.specifications())
    fused = (
        model.use_flash_attention is not False and computes_it and not on_cpu
    )  # auto: every other device has the kernel
    numerics = Numerics(
        model.compute_dtype, size_of(model.param_init_type), fused, softmax=model.softmax_compute_type,
        whole_masks=config.has_row_masks,
        wide_residual=model.fp32_residual_connection and model.compute_dtype != "float32", causal_blocks=on_cpu,
        plain_softmax=True, dropout="kept" if on_cpu else "drawn",
    )  # fmt: skip
    plan, swap = make_plan(config), config.swap_config
    moved = tuple(tuple(swap.of_layer(number).items()) for number in range(len(plan.layers))) if swap.swap else ()
    scales_heads = update.qk_clip_threshold is not None
    rule = UpdateRule(
        update.type, update.ns_steps, update.nesterov, update.block, scales_heads, size_of(model.param_init_type),
        casts_weights=model.param_init_type == "float32" or model.param_init_type != model.compute_dtype,
        master_weights=update.master_weights, wide_sums=update.accumulate_in_float32,
    )  # fmt: skip
    compared = config.is_preference_tuning and config.preference.has_reference
    workload = Workload(
        model.architecture, model.seq_length, strategy, plan, numerics, model.loss_chunks, moved, rule,
        model.base.architecture if compared else None,
    )  # fmt: skip
    return replace(workload, numerics=replace(numerics, gradient_bytes=workload.sum_bytes))
