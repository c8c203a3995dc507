"""Fewer ranks of a kind: smaller meshes that stay of the kind a YAML describes, for machines that cannot hold all of its ranks.

A mesh is of the same kind where each axis is shared if it was (data, context, tensor, experts, replicas of experts, ranks of an
expert), groups of experts are fewer or more than data-parallel ranks as before, and optimizer state is in groups of the same
kind. Stages that hold the same kinds of layers, and are neither the first nor the last one, stand for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from mindllm.config import LayerSpec, ParallelConfig, RunConfig
from mindllm.parallel.layer_plan import LayerPlan

MOST_RANKS = 64  # more take hours to compile
PARTS = 2  # micro batches for every stage


@dataclass(frozen=True)
class SmallerMesh:
    """Sizes of the mesh, numbers of the stages that are kept, optimizer shards, and micro batches for every stage."""

    data_parallel: int
    context_parallel: int
    model_parallel: int
    expert_parallel: int
    expert_model_parallel: int | None
    optimizer_shards: int
    stages: tuple[int, ...]
    parts: int = PARTS

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.context_parallel * self.model_parallel * len(self.stages)

    def sizes(self, whole: ParallelConfig) -> ParallelConfig:
        """The section ``parallel_config``, unchecked, but for its micro batches."""
        axes = ("data_parallel", "context_parallel", "model_parallel", "expert_parallel", "expert_model_parallel")
        changed = {axis: getattr(self, axis) for axis in axes}
        return whole.model_copy(update={**changed, "pipeline_stage": len(self.stages)})


def meshes(config: RunConfig, plan: LayerPlan, specs: Sequence[LayerSpec]) -> Iterator[SmallerMesh]:
    """The mesh of ``config`` and smaller ones of its kind, the most alike first: replicas go before stages, these before ranks
    of a layer or of a sequence, and these before micro batches.

    ``plan`` and ``specs`` are those of the layers that are kept.
    """
    sizes, kinds = config.parallel_config, stage_kinds(plan, specs)
    runs = len(list(itertools.groupby(kinds)))
    stages = [count for count in _divisors(plan.stages) if count >= runs]
    whole = _of_whole(config)
    axes = itertools.product(
        _divisors(sizes.model_parallel),
        _divisors(sizes.context_parallel),
        stages,
        _divisors(sizes.data_parallel),
        _divisors(sizes.expert_parallel),
        _divisors(sizes.expert_tensor_parallel),
        _divisors(whole.optimizer_shards) if whole.optimizer_shards > 0 else [whole.optimizer_shards],
    )
    found = [whole]
    for tensor, context, count, data, expert, expert_tensor, shards in axes:
        of_expert = None if sizes.expert_model_parallel is None else expert_tensor
        mesh = SmallerMesh(data, context, tensor, expert, of_expert, shards, kept_stages(kinds, count))
        if mesh != whole and (of_expert or tensor) == expert_tensor and _kind(mesh) == _kind(whole):
            found.append(mesh)
    yield from found
    yield from (replace(mesh, parts=1) for mesh in found)


def stage_kinds(plan: LayerPlan, specs: Sequence[LayerSpec]) -> list[Hashable]:
    """For each stage what it holds: its layers' specifications and recomputation by chunk, and whether it is an end."""
    layers = list(zip(plan.layers, specs, strict=True))
    return [
        (
            stage in (0, plan.stages - 1) and stage,
            tuple(
                (layer.chunk, layer.recompute, tuple(sorted(layer.patterns.items())), spec)
                for layer, spec in layers
                if layer.stage == stage
            ),
        )
        for stage in range(plan.stages)
    ]


def kept_stages(kinds: Sequence[Hashable], count: int) -> tuple[int, ...]:
    """Numbers of ``count`` stages: the first of every run of stages alike, then more of the longest runs."""
    numbers = iter(range(len(kinds)))
    runs = [[next(numbers) for _ in run] for _, run in itertools.groupby(kinds)]
    taken = [1] * len(runs)
    while sum(taken) < count:
        longest = max(range(len(runs)), key=lambda run: len(runs[run]) - taken[run])
        taken[longest] += 1
    return tuple(number for run, held in zip(runs, taken, strict=True) for number in run[:held])


def _of_whole(config: RunConfig) -> SmallerMesh:
    sizes = config.parallel_config
    return SmallerMesh(
        sizes.data_parallel,
        sizes.context_parallel,
        sizes.model_parallel,
        sizes.expert_parallel,
        sizes.expert_model_parallel,
        config.parallel.parallel_optimizer_config.optimizer_weight_shard_size,
        tuple(range(sizes.pipeline_stage)),
    )


def _kind(mesh: SmallerMesh) -> Hashable:
    tensor = mesh.expert_model_parallel or mesh.model_parallel
    replicas = mesh.data_parallel * mesh.context_parallel * mesh.model_parallel / (mesh.expert_parallel * tensor)
    copies = mesh.data_parallel * mesh.context_parallel
    several = (mesh.data_parallel, mesh.context_parallel, mesh.model_parallel, mesh.expert_parallel, tensor, replicas)
    return (
        tuple(size > 1 for size in several),
        replicas >= 1 and replicas == int(replicas),
        (mesh.expert_parallel > mesh.data_parallel) - (mesh.expert_parallel < mesh.data_parallel),
        (tensor > mesh.model_parallel) - (tensor < mesh.model_parallel),
        (mesh.optimizer_shards > 1, mesh.optimizer_shards > copies, mesh.optimizer_shards == copies),
    )


def _divisors(number: int) -> list[int]:
    """The largest first."""
    return [part for part in range(number, 0, -1) if number % part == 0]
