"""A model ready for its devices: sharded, planned, recomputed, cut into stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mindspore import nn

from mindllm.axes import CONTEXT, TENSOR
from mindllm.config import RunConfig
from mindllm.config.callbacks import LOGIT
from mindllm.finetune.preference import PreferenceLoss, base_of
from mindllm.finetune.transform import tune
from mindllm.models import CausalLM, Kernels
from mindllm.models.causal_lm import for_evaluation
from mindllm.models.pieces import InPieces
from mindllm.parallel.context import optimizer_level
from mindllm.parallel.layer_plan import LayerPlan, make_plan
from mindllm.parallel.layout import Mesh, mesh_of
from mindllm.parallel.marks import apply_swap, mark_row_parts, reuse_equal_layers, split_into_parts
from mindllm.parallel.pipeline import (
    Copies,
    Inputs,
    MicroBatches,
    SequenceOrder,
    crossings,
    fuse_gradient_communication,
    fusion_of_others,
    mark_where_parts_end,
    place_on_stages,
    place_pairs_on_stages,
)
from mindllm.parallel.plan_text import plan_lines
from mindllm.parallel.recompute import apply_recompute
from mindllm.parallel.sharding import apply_sharding, sharding_table
from mindllm.parallel.sharding.preference import crossing_tables, pairs_table
from mindllm.parallel.thin_layers import can_be_thin, make_others_thin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelModel:
    """A model and how it lies on its devices.

    ``network`` maps ``[batch, seq]`` inputs to the loss summed over all micro batches; ``parts`` is their number, and
    ``reused`` says whether they share one compiled graph. ``evaluated`` is the same without layers that predict ahead.
    """

    model: CausalLM
    network: nn.Cell
    evaluated: nn.Cell
    plan: LayerPlan
    mesh: Mesh
    parts: int = 1
    reused: bool = False


def kernels_of(config: RunConfig) -> Kernels:
    """The operators the model is written with. Forms made for one CPU are not used on several devices."""
    kernels, sizes = replica_kernels(config), config.parallel_config
    if mesh_of(config).device_num == 1:
        return kernels
    balanced = sizes.context_parallel_balanced
    kernels = replace(kernels, cpu=False, sequence_ranks=sizes.size(CONTEXT), balanced=balanced)
    kernels = replace(kernels, ring=sizes.passes_keys, tensor_ranks=sizes.size(TENSOR))
    if sizes.seq_split_num > 1:
        rows = config.runner_config.batch_size * sizes.data_parallel
        pieces = InPieces(sizes.seq_split_num, rows, sizes.data_parallel, sizes.model_parallel)
        kernels = replace(kernels, pieces=pieces)
    parts = config.model.config.fine_grain_interleave
    return replace(kernels, row_parts=parts, joins=_ends_of_stages(config)) if parts > 1 else kernels


def _ends_of_stages(config: RunConfig) -> frozenset[int]:
    """Numbers of the layers behind which another stage goes on."""
    return frozenset(number - 1 for number in crossings(make_plan(config)))


def replica_kernels(config: RunConfig, fuses: bool = True) -> Kernels:
    """The operators of a whole model on one device, which reads the columns the batches of the run have."""
    kernels = Kernels.choose(config.model.config, config.context.device_target, fuses)
    watches = LOGIT in config.monitor_config.watched() or config.optimizer.qk_clip_threshold is not None
    return replace(kernels, document_masks=config.uses_position_ids, watches_logits=watches)


def build_replica(config: RunConfig, fuses: bool = True) -> nn.Cell:
    """Builds the whole model for one device, with its loss: nothing but recomputation is applied to it.

    ``fuses``: elementwise operators are fused there.

    Raises:
        UserError: recompute patterns that match nothing, contradictory lists.
    """
    plan = _announced_plan(config)
    kernels = replica_kernels(config, fuses)
    model = _build(config, kernels, plan)
    if kernels.cpu:
        reuse_equal_layers(model.model.layers, plan, config)
    return _with_loss(config, model, kernels, plan)


def build_parallel_model(config: RunConfig, alone: int | None = None, balanced: bool = False) -> ParallelModel:
    """Builds the model of a configuration on its devices; on one of them, as :func:`build_replica`.

    Call :func:`mindllm.parallel.set_parallel_context` first.

    Args:
        alone: the stage whose graph is wanted, for which the layers of others can be thin (:mod:`mindllm.parallel.thin_layers`).
        balanced: tokens that are sent to their experts have the lengths of a router that spreads them evenly.

    Raises:
        UserError: recompute patterns that match nothing, contradictory lists.
    """
    mesh = mesh_of(config)
    if mesh.device_num == 1:
        whole = build_replica(config)
        model = whole.policy if isinstance(whole, PreferenceLoss) else whole
        return _parallel_model(
            model, whole, lambda network: _inputs(network, config, sharded=False), make_plan(config), mesh
        )
    plan, kernels = _announced_plan(config), kernels_of(config)
    model = _build(config, kernels, plan)
    if plan.stages > 1:
        place_on_stages(model, plan, config.model.config, kernels)
    split_into_parts(model, mesh, balanced)
    apply_sharding(model, sharding_table(model, config.parallel_config), mesh)
    mark_row_parts(model)
    fuse_gradient_communication(model, plan, config.parallel_config.gradient_aggregation_group)
    if alone is not None and can_be_thin(config):
        make_others_thin(model, plan, alone)
    order = SequenceOrder(kernels.positions(config.model.config.seq_length), mesh) if kernels.balanced else None
    whole = _with_loss(config, model, kernels, plan)
    if isinstance(whole, PreferenceLoss):
        _place_pairs(whole, config, plan, mesh, balanced)
    copies = config.micro_batch_interleave_num
    parts = config.parallel_config.micro_batch_num * config.runner_config.gradient_accumulation_steps
    at_once, reused = parts == 1 and plan.stages == 1, _can_be_reused(config)
    if parts > 1 and plan.stages == 1:
        mark_where_parts_end(model)

    def around(network: nn.Cell) -> nn.Cell:
        network = Copies(network, copies) if copies > 1 else network
        pieces = config.parallel_config.seq_split_num
        network = network if at_once else MicroBatches(network, parts, plan.stages > 1, reused, pieces)
        return _inputs(network, config, order=order)

    return _parallel_model(model, whole, around, plan, mesh, parts, reused and not at_once)


def _parallel_model(
    model: CausalLM,
    whole: nn.Cell,
    around: Callable[[nn.Cell], nn.Cell],
    plan: LayerPlan,
    mesh: Mesh,
    parts: int = 1,
    reused: bool = False,
) -> ParallelModel:
    """``around`` gives the cell with the loss, or the one that evaluates, what it is fed by."""
    network, evaluated = around(whole), for_evaluation(whole)
    return ParallelModel(
        model, network, network if evaluated is whole else around(evaluated), plan, mesh, parts, reused
    )


def _inputs(network: nn.Cell, config: RunConfig, sharded: bool = True, order: SequenceOrder | None = None) -> Inputs:
    return Inputs(network, config.uses_position_ids, config.model.config.architecture.drops, sharded, order)


def _announced_plan(config: RunConfig) -> LayerPlan:
    plan = make_plan(config)
    is_plain = not any(layer.recompute or layer.patterns for layer in plan.layers) and plan.stages == 1
    for line in plan_lines(plan):
        logger.log(logging.DEBUG if is_plain else logging.INFO, line)
    return plan


def _build(config: RunConfig, kernels: Kernels, plan: LayerPlan) -> CausalLM:
    model = CausalLM(config.model.config, kernels)
    tune(model, config.model.config, kernels)
    apply_recompute(model.model.layers, plan, config)
    apply_swap(model.model.layers, plan, config)
    return model


def _with_loss(config: RunConfig, model: CausalLM, kernels: Kernels, plan: LayerPlan) -> nn.Cell:
    """The cell that gives the loss of a batch: the model itself, or for pairs of answers with its reference."""
    if not config.is_preference_tuning:
        return model
    length = config.model.config.seq_length
    if not config.preference.has_reference:
        return PreferenceLoss(model, None, config.preference, length)
    place = partial(place_on_stages, plan=plan, model=config.model.config, kernels=kernels) if plan.stages > 1 else None
    reference = base_of(model, config.model.config, kernels, place)
    return PreferenceLoss(model, reference, config.preference, length, crossings(plan))


def _place_pairs(whole: PreferenceLoss, config: RunConfig, plan: LayerPlan, mesh: Mesh, balanced: bool) -> None:
    """What learning from pairs adds to a model on its devices."""
    if plan.stages > 1:
        place_pairs_on_stages(whole, plan)
    if whole.reference is not None:
        split_into_parts(whole.reference, mesh, balanced)
        apply_sharding(whole.reference, sharding_table(whole.reference, config.parallel_config), mesh)
    for cell, table in ((whole.pairs, pairs_table(whole.pairs)), *crossing_tables(whole, config.parallel_config)):
        apply_sharding(cell, table, mesh)
    whole.pairs.set_comm_fusion(fusion_of_others(plan, config.parallel_config.gradient_aggregation_group))


def _can_be_reused(config: RunConfig) -> bool:
    """Whether micro batches can share one compiled network.

    Without a pipeline, MindSpore 2.10 does not gather weights inside such a network that a parallel optimizer shards,
    except on its level 3. Then each part is compiled for itself, which takes time in proportion.
    """
    pipeline = config.parallel_config.pipeline_stage > 1
    return pipeline or not config.parallel.enable_parallel_optimizer or optimizer_level(config) == "level3"
