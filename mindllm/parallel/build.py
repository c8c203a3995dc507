"""A model ready for its devices: sharded, planned, recomputed, cut into stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from mindspore import nn

from mindllm.config import RunConfig
from mindllm.models import CausalLM, Kernels
from mindllm.models.causal_lm import for_evaluation
from mindllm.parallel.context import optimizer_level
from mindllm.parallel.layer_plan import LayerPlan, make_plan
from mindllm.parallel.layout import Mesh, mesh_of
from mindllm.parallel.pipeline import (
    Inputs,
    MicroBatches,
    fuse_gradient_communication,
    place_on_stages,
)
from mindllm.parallel.plan_text import plan_lines
from mindllm.parallel.recompute import apply_recompute
from mindllm.parallel.reuse import reuse_equal_layers
from mindllm.parallel.sharding import apply_sharding, sharding_table
from mindllm.tune.transform import tune

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
    kernels = replica_kernels(config)
    return kernels if mesh_of(config).devices == 1 else replace(kernels, cpu=False)


def replica_kernels(config: RunConfig) -> Kernels:
    """The operators of a whole model on one device, which reads the columns the batches of the run have."""
    kernels = Kernels.choose(config.model.config, config.context.device_target)
    return replace(kernels, document_masks=bool(config.train_dataset.document_columns))


def build_replica(config: RunConfig) -> CausalLM:
    """Builds the whole model for one device: nothing but recomputation is applied to it.

    Raises:
        UserError: recompute patterns that match nothing, contradictory lists.
    """
    plan = _announced_plan(config)
    kernels = replica_kernels(config)
    model = _build(config, kernels, plan)
    if kernels.cpu:
        reuse_equal_layers(model.model.layers, plan, config)
    return model


def build_parallel_model(config: RunConfig) -> ParallelModel:
    """Builds the model of a configuration on its devices; on one of them, as :func:`build_replica`.

    Call :func:`mindllm.parallel.set_parallel_context` first.

    Raises:
        UserError: recompute patterns that match nothing, contradictory lists.
    """
    mesh = mesh_of(config)
    if mesh.devices == 1:
        model = build_replica(config)
        return _parallel_model(model, lambda lm: _inputs(lm, config, sharded=False), make_plan(config), mesh)
    plan, kernels = _announced_plan(config), kernels_of(config)
    model = _build(config, kernels, plan)
    if plan.stages > 1:
        place_on_stages(model, plan, config.model.config, kernels)
    apply_sharding(model, sharding_table(model, config.parallel_config), mesh)
    fuse_gradient_communication(model, plan, config.parallel_config.gradient_aggregation_group)
    parts = config.parallel_config.micro_batch_num * config.runner_config.gradient_accumulation_steps
    if parts == 1 and plan.stages == 1:
        return _parallel_model(model, lambda lm: _inputs(lm, config), plan, mesh)
    reused = _can_be_reused(config)

    def in_parts(lm: nn.Cell) -> nn.Cell:
        return _inputs(MicroBatches(lm, parts, plan.stages > 1, reused), config)

    return _parallel_model(model, in_parts, plan, mesh, parts, reused)


def _parallel_model(
    model: CausalLM,
    around: Callable[[nn.Cell], nn.Cell],
    plan: LayerPlan,
    mesh: Mesh,
    parts: int = 1,
    reused: bool = False,
) -> ParallelModel:
    """``around`` gives a model what it is fed by, in training and where it is evaluated."""
    network, evaluated = around(model), for_evaluation(model)
    return ParallelModel(
        model, network, network if evaluated is model else around(evaluated), plan, mesh, parts, reused
    )


def _inputs(network: nn.Cell, config: RunConfig, sharded: bool = True) -> Inputs:
    documents = bool(config.train_dataset.document_columns)
    return Inputs(network, documents, config.model.config.architecture.drops, sharded)


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
    return model


def _can_be_reused(config: RunConfig) -> bool:
    """Whether micro batches can share one compiled network.

    Without a pipeline, MindSpore 2.10 does not gather weights inside such a network that a parallel optimizer shards,
    except on its level 3. Then each part is compiled for itself, which takes time in proportion.
    """
    pipeline = config.parallel_config.pipeline_stage > 1
    return pipeline or not config.parallel.enable_parallel_optimizer or optimizer_level(config) == "level3"
