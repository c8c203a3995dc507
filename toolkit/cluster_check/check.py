"""The check itself: compile all ranks, train a single device and the cluster side by side, hold both together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindllm.compiled.compile_ranks import RankCompilation
from mindllm.compiled.execute.cluster import Cluster
from mindllm.compiled.graph import CompiledGraph
from mindllm.config import RunConfig
from toolkit.cluster_check.compare import TOLERANCES, Comparison, Tolerance, compare
from toolkit.cluster_check.scale import mesh_of_run, scaled, single_device
from toolkit.cluster_check.single import Arrays, SingleDevice, Task, tasks

Say = Callable[[str], None]
SEED = 1


@dataclass(frozen=True)
class Options:
    """How to check. ``real_dtype`` computes in the dtypes of the YAML instead of fp32."""

    steps: int = 2
    real_dtype: bool = False
    mindspore_kernels: bool = False
    workers: int | None = None
    cache: Path | None = None


@dataclass(frozen=True)
class Reference:
    """A single device's training: state before it, and result and state after every step."""

    initial: Arrays
    tasks: list[Task]
    results: list
    states: list[Arrays]


@dataclass(frozen=True)
class Outcome:
    """The answer. ``problems`` is empty where all ranks together compute what a single device does."""

    config: RunConfig
    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]
    ranks: int
    seconds: Mapping[str, float]
    first_difference: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems


def check(config: RunConfig, options: Options, say: Say = lambda text: None) -> Outcome:
    """Checks the parallelism of ``config`` on a small model.

    Raises:
        UserError: the configuration is wrong, or does not compile.
        Deadlock: ranks wait for each other.
    """
    small = scaled(config, options.real_dtype)
    begun = time.monotonic()
    with RankCompilation(small, options.cache, options.workers) as compilation:
        say(f"compiling {compilation.devices} ranks, {compilation.workers} at a time")
        reference = train_single(small, options.steps)
        graphs = compilation.graphs(lambda done: say(f"compiling: {done} of {compilation.devices} ranks"))
    compiled = time.monotonic()
    say("executing")
    comparisons = train_cluster(small, graphs, reference, options.mindspore_kernels)
    seconds = {"compile": compiled - begun, "execute": time.monotonic() - compiled, "total": time.monotonic() - begun}
    return Outcome(small, comparisons, tuple(first_problems(comparisons)), len(graphs), seconds)


def first_problems(comparisons: tuple[Comparison, ...]) -> list[str]:
    """What the first step that differs has to say."""
    for number, comparison in enumerate(comparisons, start=1):
        if problems := comparison.problems():
            return [f"step {number}: {problem}" for problem in problems]
    return []


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
    tolerance = tolerance_of(config)
    return tuple(
        compare(result, state, cluster.step(task.batch, task.rate, task.scale), cluster, tolerance)
        for task, result, state in zip(reference.tasks, reference.results, reference.states, strict=True)
    )


def build_cluster(
    config: RunConfig, graphs: list[CompiledGraph], state: Arrays, mindspore_kernels: bool = False
) -> Cluster:
    """A cluster with these weights and this optimizer state."""
    from mindllm.train.distributed_step import input_slices

    whole = {**state, **tables(config, graphs)}
    return Cluster(graphs, mesh_of_run(config).pipeline_stage, input_slices(config), whole, mindspore_kernels)


def tables(config: RunConfig, graphs: list[CompiledGraph]) -> Arrays:
    """Tables of rotary angles and masks, of which each stage has a copy of its own."""
    from mindllm.models.decoder import AttentionTables
    from mindllm.parallel.build import kernels_of

    made = AttentionTables(config.model.config, kernels_of(config)).parameters_dict()
    arrays = {name: np.asarray(parameter.asnumpy()) for name, parameter in made.items()}
    names = {name for graph in graphs for name in graph.parameters}
    return {name: arrays[last] for name in names if (last := name.rsplit(".", 1)[-1]) in arrays}


def tolerance_of(config: RunConfig) -> Tolerance:
    """What is rounding in the dtype the model computes in."""
    return TOLERANCES[config.model.config.compute_dtype]
