"""Fewer ranks of a kind: smaller meshes that stay of the kind a YAML describes, for machines that cannot hold all of its ranks.

A mesh is of the same kind where each axis is shared if it was (data, context, tensor, experts, replicas of experts, ranks of an
expert), groups of experts are fewer or more than data-parallel ranks as before, and optimizer state is in groups of the same
kind. Stages that hold the same kinds of layers, and are neither the first nor the last one, stand for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindllm.architecture.layer import LayerSpec
from mindllm.axes import CONTEXT, DATA, EXPERT_TENSOR, EXPERTS, PIPELINE, STAGE_AXES, TENSOR, keys_of
from mindllm.config import ParallelConfig, RunConfig
from mindllm.parallel.layer_plan import LayerPlan
from mindllm.parallel.layout import Mesh
from mindllm.reduced_runs.layers import kept_layers, kept_plan

LAST_TO_SHRINK = (TENSOR, CONTEXT, PIPELINE, DATA, EXPERTS, EXPERT_TENSOR)
"""Axes in the order in which they keep their size: the first ones the longest."""
PARTS = 2  # micro batches for every stage


@dataclass(frozen=True)
class ReducedMesh(Mesh):
    """Sizes of the mesh, numbers of the stages that are kept, optimizer shards, and micro batches for every stage."""

    optimizer_shards: int = -1
    stages: tuple[int, ...] = (0,)
    parts: int = PARTS

    def sizes(self, whole: ParallelConfig) -> ParallelConfig:
        """Return section ``parallel_config``, unchecked, without its micro-batches."""
        return whole.model_copy(update=keys_of(self))


def reduced_meshes(config: RunConfig) -> Iterator[ReducedMesh]:
    """Yield the mesh of ``config`` and smaller ones of its kind, the most alike first.

    Replicas go before stages, these before ranks of a layer or of a sequence, and these before micro batches.
    """
    numbers = kept_layers(config)
    plan, sizes = kept_plan(config, numbers), config.parallel_config
    kinds = stage_kinds(plan, [config.model.config.architecture.layers[number] for number in numbers])
    runs = len(list(itertools.groupby(kinds)))
    stages = [count for count in _divisors(plan.stages) if count >= runs]
    full = _of_whole(config)
    shards = _divisors(full.optimizer_shards) if full.optimizer_shards > 0 else [full.optimizer_shards]
    less = [stages if axis is PIPELINE else _divisors(sizes.size(axis)) for axis in LAST_TO_SHRINK]
    meshes = [full]
    for *chosen, optimizer_shards in itertools.product(*less, shards):
        sizes_by_axis: dict[str, Any] = {axis.key: size for axis, size in zip(LAST_TO_SHRINK, chosen, strict=True)}
        expert_tensor = sizes_by_axis.pop(EXPERT_TENSOR.key)
        sizes_by_axis[EXPERT_TENSOR.key] = None if sizes.expert_model_parallel is None else expert_tensor
        kept = kept_stages(kinds, sizes_by_axis[PIPELINE.key])
        mesh = ReducedMesh(**sizes_by_axis, optimizer_shards=optimizer_shards, stages=kept)
        if mesh != full and mesh.expert_tensor_parallel == expert_tensor and _kind(mesh) == _kind(full):
            meshes.append(mesh)
    yield from meshes
    yield from (replace(mesh, parts=1) for mesh in meshes)


def reduce_mesh(config: RunConfig, mesh: ReducedMesh) -> RunConfig:
    """Return the configuration with the sizes of a smaller mesh, unchecked: its layers are still those of the whole one."""
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


def stage_kinds(plan: LayerPlan, specs: Sequence[LayerSpec]) -> list[Hashable]:
    """Return what each stage holds: the kinds of its layers by chunk, and whether it is an end."""
    kinds = plan.kinds(specs)
    return [
        (
            stage in (0, plan.stages - 1) and stage,
            tuple((layer.chunk, kind) for layer, kind in zip(plan.layers, kinds, strict=True) if layer.stage == stage),
        )
        for stage in range(plan.stages)
    ]


def kept_stages(kinds: Sequence[Hashable], count: int) -> tuple[int, ...]:
    """Return the numbers of ``count`` stages: the first of every run of equal stages, then more of the longest runs."""
    numbers = iter(range(len(kinds)))
    runs = [[next(numbers) for _ in run] for _, run in itertools.groupby(kinds)]
    taken = [1] * len(runs)
    while sum(taken) < count:
        longest = max(range(len(runs)), key=lambda run: len(runs[run]) - taken[run])
        taken[longest] += 1
    return tuple(number for run, held in zip(runs, taken, strict=True) for number in run[:held])


def _of_whole(config: RunConfig) -> ReducedMesh:
    sizes, optimizer = config.parallel_config, config.parallel.parallel_optimizer_config
    return ReducedMesh(
        **keys_of(sizes),
        optimizer_shards=optimizer.optimizer_weight_shard_size,
        stages=tuple(range(sizes.pipeline_stage)),
    )


def _kind(mesh: ReducedMesh) -> Hashable:
    tensor, copies = mesh.expert_tensor_parallel, mesh.replica_num
    replicas = mesh.stage_device_num / (mesh.expert_parallel * tensor)
    several = (*map(mesh.size, (*STAGE_AXES, EXPERTS, EXPERT_TENSOR)), replicas)
    return (
        tuple(size > 1 for size in several),
        replicas >= 1 and replicas == int(replicas),
        (mesh.expert_parallel > mesh.data_parallel) - (mesh.expert_parallel < mesh.data_parallel),
        (tensor > mesh.model_parallel) - (tensor < mesh.model_parallel),
        (mesh.optimizer_shards > 1, mesh.optimizer_shards > copies, mesh.optimizer_shards == copies),
    )


def _divisors(number: int) -> list[int]:
    """Return the divisors, the largest first."""
    return [part for part in range(number, 0, -1) if number % part == 0]
