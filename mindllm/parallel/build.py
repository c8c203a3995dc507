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
from mindllm.finetune.preference import PreferenceLoss, make_reference
from mindllm.finetune.transform import tune
from mindllm.models import CausalLM, Kernels
from mindllm.models.causal_lm import for_evaluation
from mindllm.models.loss import CrossEntropy
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
    mark_where_parts_end,
    outer_fusion,
    place_on_stages,
    place_pairs_on_stages,
)
from mindllm.parallel.plan_text import plan_lines
from mindllm.parallel.recompute import apply_recompute
from mindllm.parallel.sharding import apply_sharding, sharding_table
from mindllm.parallel.sharding.cells import has_split_vocabulary
from mindllm.parallel.sharding.preference import crossing_tables, pairs_table
from mindllm.parallel.thin_layers import can_be_thin, thin_other_stages

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelModel:
    """A model on its devices.

    ``network`` maps ``[batch, seq]`` inputs to the loss summed over all micro batches; ``parts`` is their number, and
    ``reused`` is True if they share one compiled graph. ``evaluated`` is the network without prediction layers.
    """

    model: CausalLM
    network: nn.Cell
    evaluated: nn.Cell
    plan: LayerPlan
    mesh: Mesh
    parts: int = 1
    reused: bool = False


def kernels_of(config: RunConfig) -> Kernels:
    """Return the operators for a model on all of its devices. Forms for a single CPU are not used on several devices."""
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
    return replace(kernels, row_parts=parts, joins=_stage_ends(config)) if parts > 1 else kernels


def _stage_ends(config: RunConfig) -> frozenset[int]:
    """Return the numbers of the last layers of stages that are followed by another stage."""
    return frozenset(number - 1 for number in crossings(make_plan(config)))


def replica_kernels(config: RunConfig, fuses: bool = True) -> Kernels:
    """Return the operators for a complete model on one device, which reads the columns of the run's batches."""
    kernels = Kernels.choose(config.model.config, config.context.device_target, fuses)
    watches = LOGIT in config.monitor_config.watched() or config.optimizer.qk_clip_threshold is not None
    return replace(kernels, document_masks=config.uses_position_ids, watches_logits=watches)


def build_replica(config: RunConfig, fuses: bool = True) -> nn.Cell:
    """Build the complete model for one device with its loss. Only recomputation is applied to it.

    ``fuses``: whether elementwise operators are fused.

    Raises:
        UserError: recompute patterns that match nothing, contradictory lists.
    """
    plan = _announced_plan(config)
    kernels = replica_kernels(config, fuses)
    model = _build(config, kernels, plan)
    if kernels.cpu:
        reuse_equal_layers(model.model.layers, plan, config)
    return _with_loss(config, model, kernels, plan)


def build_parallel_model(config: RunConfig, single_stage: int | None = None, balanced: bool = False) -> ParallelModel:
    """Build the model of a configuration on its devices. On a single device it equals :func:`build_replica`.

    Call :func:`mindllm.parallel.set_parallel_context` first.

    Args:
        single_stage: the stage whose graph is compiled, for which the layers of others can be thin
        (:mod:`mindllm.parallel.thin_layers`).
        balanced: tokens are sent to experts in the numbers of a router that spreads them evenly.

    Raises:
        UserError: recompute patterns that match nothing, contradictory lists.
    """
    mesh = mesh_of(config)
    if mesh.device_num == 1:
        loss_cell = build_replica(config)
        model = loss_cell.policy if isinstance(loss_cell, PreferenceLoss) else loss_cell
        return _parallel_model(
            model, loss_cell, lambda network: _inputs(network, config, sharded=False), make_plan(config), mesh
        )
    plan, kernels = _announced_plan(config), kernels_of(config)
    model = _build(config, kernels, plan)
    if plan.stages > 1:
        place_on_stages(model, plan, config.model.config, kernels)
    split_into_parts(model, mesh, balanced)
    apply_sharding(model, sharding_table(model, config.parallel_config), mesh)
    if isinstance(model.cross_entropy, CrossEntropy) and has_split_vocabulary(model, config.parallel_config):
        model.cross_entropy.vocabulary_ranks = mesh.model_parallel
    mark_row_parts(model)
    fuse_gradient_communication(model, plan, config.parallel_config.gradient_aggregation_group)
    if single_stage is not None and can_be_thin(config):
        thin_other_stages(model, plan, single_stage)
    order = SequenceOrder(kernels.positions(config.model.config.seq_length), mesh) if kernels.balanced else None
    loss_cell = _with_loss(config, model, kernels, plan)
    if isinstance(loss_cell, PreferenceLoss):
        _place_pairs(loss_cell, config, plan, mesh, balanced)
    copies = config.micro_batch_interleave_num
    parts = config.parallel_config.micro_batch_num * config.runner_config.gradient_accumulation_steps
    single_batch, reused = parts == 1 and plan.stages == 1, _can_be_reused(config)
    if parts > 1 and plan.stages == 1:
        mark_where_parts_end(model)

    def wrap(network: nn.Cell) -> nn.Cell:
        network = Copies(network, copies) if copies > 1 else network
        pieces = config.parallel_config.seq_split_num
        network = network if single_batch else MicroBatches(network, parts, plan.stages > 1, reused, pieces)
        return _inputs(network, config, order=order)

    return _parallel_model(model, loss_cell, wrap, plan, mesh, parts, reused and not single_batch)


def _parallel_model(
    model: CausalLM,
    loss_cell: nn.Cell,
    wrap: Callable[[nn.Cell], nn.Cell],
    plan: LayerPlan,
    mesh: Mesh,
    parts: int = 1,
    reused: bool = False,
) -> ParallelModel:
    """Return the model. ``wrap`` adds its inputs to the cell with the loss, and to the one for evaluation."""
    network, evaluated = wrap(loss_cell), for_evaluation(loss_cell)
    return ParallelModel(
        model, network, network if evaluated is loss_cell else wrap(evaluated), plan, mesh, parts, reused
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
    """Return the cell that computes the loss of a batch: the model, or for pairs of answers the model with its reference."""
    if not config.is_preference_tuning:
        return model
    length = config.model.config.seq_length
    if not config.preference.has_reference:
        return PreferenceLoss(model, None, config.preference, length)
    place = partial(place_on_stages, plan=plan, model=config.model.config, kernels=kernels) if plan.stages > 1 else None
    reference = make_reference(model, config.model.config, kernels, place)
    return PreferenceLoss(model, reference, config.preference, length, crossings(plan))


def _place_pairs(pairs_loss: PreferenceLoss, config: RunConfig, plan: LayerPlan, mesh: Mesh, balanced: bool) -> None:
    """Place and shard the cells that learning from pairs adds to a model."""
    if plan.stages > 1:
        place_pairs_on_stages(pairs_loss, plan)
    if pairs_loss.reference is not None:
        split_into_parts(pairs_loss.reference, mesh, balanced)
        apply_sharding(pairs_loss.reference, sharding_table(pairs_loss.reference, config.parallel_config), mesh)
    for cell, table in (
        (pairs_loss.pairs, pairs_table(pairs_loss.pairs)),
        *crossing_tables(pairs_loss, config.parallel_config),
    ):
        apply_sharding(cell, table, mesh)
    pairs_loss.pairs.set_comm_fusion(outer_fusion(plan, config.parallel_config.gradient_aggregation_group))


def _can_be_reused(config: RunConfig) -> bool:
    """Return True if micro-batches can share one compiled network.

    Without a pipeline, MindSpore 2.10 does not gather weights inside such a network that a parallel optimizer shards,
    except on its level 3. Then each part is compiled separately, which takes proportionally longer.
    """
    pipeline = config.parallel_config.pipeline_stage > 1
    return pipeline or not config.parallel.enable_parallel_optimizer or optimizer_level(config) == "level3"
