"""Both sides: a single CPU device that trains, and the cluster that begins where it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.compiled.execute.cluster import Cluster
from mindllm.compiled.execute.machine import Observer
from mindllm.compiled.graph import CompiledGraph
from mindllm.config import RunConfig
from mindllm.parallel.layout import mesh_of
from mindllm.train.engine import StepResult
from toolkit.cluster_check.compare import TOLERANCES, Comparison, compare
from toolkit.cluster_check.scale import single_device
from toolkit.cluster_check.single import Arrays, SingleDevice, Task, tasks

SEED = 1


@dataclass(frozen=True)
class Reference:
    """A single device's training: state before it, and result and state after every step."""

    initial: Arrays
    tasks: list[Task]
    results: list[StepResult]
    states: list[Arrays]


def train_single(config: RunConfig, steps: int) -> Reference:
    """Trains a single CPU device."""
    from mindllm.train.device import set_up_device

    one = single_device(config)
    set_up_device(one)
    device = SingleDevice(one)
    work = tasks(config, steps, SEED)
    initial, results, states = device.state(), [], []
    for task in work:
        results.append(device.step(task))
        states.append(device.state())
    return Reference(initial, work, results, states)


def train_cluster(
    config: RunConfig, graphs: list[CompiledGraph], reference: Reference, mindspore_kernels: bool = False
) -> tuple[Comparison, ...]:
    """Trains the cluster from the same state on the same batches, and compares after every step."""
    cluster = build_cluster(config, graphs, reference.initial, mindspore_kernels)
    tolerance = TOLERANCES[config.model.config.compute_dtype]
    return tuple(
        compare(result, state, cluster.step(task.batch, task.rate, task.scale), cluster, tolerance)
        for task, result, state in zip(reference.tasks, reference.results, reference.states, strict=True)
    )


def build_cluster(
    config: RunConfig,
    graphs: list[CompiledGraph],
    state: Mapping[str, Any],
    mindspore_kernels: bool = False,
    observer: Observer | None = None,
) -> Cluster:
    """A cluster with these weights and this optimizer state: arrays, or tensors of a checkpoint."""
    from mindllm.train.distributed_step import input_slices

    whole = {**state, **tables(config, graphs)}
    return Cluster(graphs, mesh_of(config).pipeline_stage, input_slices(config), whole, mindspore_kernels, observer)


def tables(config: RunConfig, graphs: list[CompiledGraph]) -> Arrays:
    """Tables of rotary angles and masks, of which each stage has a copy of its own."""
    from mindllm.models.decoder import AttentionTables
    from mindllm.parallel.build import kernels_of

    made = AttentionTables(config.model.config, kernels_of(config)).parameters_dict()
    arrays = {name: np.asarray(parameter.asnumpy()) for name, parameter in made.items()}
    names = {name for graph in graphs for name in graph.parameters}
    return {name: arrays[below] for name in names if (below := _below_tables(name)) in arrays}


def _below_tables(name: str) -> str:
    """``contexts.0.rotary_cos`` of ``model.tables.1.contexts.0.rotary_cos``."""
    return ".".join(name.split(".")[-3:])
