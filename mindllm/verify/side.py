"""Both sides: a single CPU device that trains, and the cluster that begins where it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import is_state
from mindllm.compiled.execute.cluster import Cluster
from mindllm.compiled.execute.rank_interpreter import Observer
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.config import RunConfig
from mindllm.parallel.context import input_columns
from mindllm.parallel.layout import mesh_of
from mindllm.reduced_runs.model import single_device
from mindllm.train.engine import StepResult
from mindllm.train.engine.columns import completed
from mindllm.verify.compare import TOLERANCES, Comparison, compare
from mindllm.verify.decay import Updates
from mindllm.verify.single import Arrays, SingleDevice, Task, tasks

SEED = 1


@dataclass(frozen=True)
class Reference:
    """A single device's training: its tables, weights that stay, state before it, and result and state after every step."""

    tables: Arrays
    frozen: Arrays
    initial: Arrays
    tasks: list[Task]
    results: list[StepResult]
    states: list[Arrays]

    def before(self, step: int) -> Arrays:
        """State before step number ``step`` (from 0)."""
        return self.states[step - 1] if step else self.initial

    def given(self, step: int) -> Arrays:
        """What a cluster that begins with this step is given: the state, but its own optimizer's at the start of the run."""
        if step:
            return {**self.frozen, **self.before(step)}
        return {**self.frozen, **{name: item for name, item in self.initial.items() if not is_state(name)}}


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
    return Reference(device.tables(), device.frozen(), initial, work, results, states)


def train_cluster(
    config: RunConfig, graphs: list[CompiledGraph], reference: Reference, mindspore_kernels: bool = False
) -> tuple[Comparison, ...]:
    """Trains the cluster from the same weights on the same batches, and compares after every step."""
    cluster = build_cluster(config, graphs, reference.given(0), mindspore_kernels)
    tolerance = TOLERANCES[config.model.config.compute_dtype]
    comparisons = []
    for number, task in enumerate(reference.tasks):
        weights = [machine.values() for machine in cluster.machines]
        found = cluster.step(columns_read(config, task.batch), task.rate, task.scale, task.spoiled)
        comparison = compare(reference.results[number], reference.states[number], found, cluster, tolerance)
        if not task.overflows:
            updates = Updates(config.optimizer, task.rate, reference.before(number), reference.states[number])
            comparison = replace(comparison, decays=tuple(updates.decay_errors(cluster, weights)))
        comparisons.append(comparison)
    return tuple(comparisons)


def columns_read(config: RunConfig, batch: Mapping[str, np.ndarray]) -> Arrays:
    """The columns of a batch that the graphs of a configuration are given; where it has none, every row is one document."""
    return dict(completed(batch, input_columns(config)))


def build_cluster(
    config: RunConfig,
    graphs: list[CompiledGraph],
    state: Mapping[str, Any],
    mindspore_kernels: bool = False,
    observer: Observer | None = None,
) -> Cluster:
    """A cluster with these weights and this optimizer state: arrays, or tensors of a checkpoint.

    What ``state`` leaves out begins as it does in the graphs.
    """
    from mindllm.train.distributed_step import input_slices

    return Cluster(graphs, mesh_of(config).pipeline_stage, input_slices(config), state, mindspore_kernels, observer)
