"""Both sides: a single CPU device that trains, and the cluster that begins where it began.

Whether every weight is decayed as much as on a single device is found in the updates themselves. In short floating types
rounding changes gradients by more than a decay changes weights. But weights and moments are fp32 on both sides: what is left of
an update without Adam's part, which the new moments give, is the decay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import LAYER_POWERS, MOMENT_PREFIXES, POWERS, is_of_layer, is_state
from mindllm.compiled.execute.cluster import Cluster, ClusterStep
from mindllm.compiled.execute.rank_interpreter import Observer
from mindllm.compiled.graph.compiled_graph import CONSTANT, CompiledGraph, Node
from mindllm.config import OptimizerConfig, RunConfig
from mindllm.parallel.context import input_columns
from mindllm.parallel.layout import mesh_of
from mindllm.reduced_runs.model import single_device
from mindllm.train.checkpoint.parts import Part
from mindllm.train.engine import StepResult
from mindllm.train.engine.columns import with_document_columns
from mindllm.verify.compare import HALVES, Comparison, cluster_parts, compare, errors_from_moments, tolerance_for
from mindllm.verify.recomputed.balance import balance_problems, bias_problems, share_problems
from mindllm.verify.recomputed.coded_state import AppliedGradients, decode_state
from mindllm.verify.recomputed.kept_values import StepValues
from mindllm.verify.recomputed.loss import last_gradients, loss_problems
from mindllm.verify.recomputed.slope import slope_problems
from mindllm.verify.recomputed.update import head_factors, update_problems
from mindllm.verify.single import BEYOND_NORMS, FINAL_NORM, Arrays, SingleDevice, Task, tasks

TOLERANCE = 1e-3
"""Of a decay, which is a number such as 0.1; rounding of fp32 changes it by about 1e-5."""
SEED = 1
TINY = 1e-30
CLIPPING = re.compile(r"update-ApplyGradients/[^/]+$")
"""Scopes of the operators that clip."""
ON_BOTH = "(on a single device, too)"
"""Ends what the ranks and the single device have wrong alike."""


class Updates:
    """One optimizer step of a single device: weights and state ``before`` and ``after`` it, at the learning rate of each.

    Weights whose moments are projected (GaLore) are left out: their update does not follow from moments alone. So are those
    that QK-clip has ``scaled``.
    """

    def __init__(
        self,
        optimizer: OptimizerConfig,
        rate_of: Callable[[str], float],
        before: Arrays,
        after: Arrays,
        scaled: Collection[str] = (),
    ) -> None:
        self.epsilon, self.rate_of, self.corrects = optimizer.eps, rate_of, optimizer.bias_correction
        moments = {name: after.get(f"{MOMENT_PREFIXES[0]}{name}") for name in before}
        weights = [
            name
            for name, moment in moments.items()
            if moment is not None
            and moment.shape == before[name].shape
            and name not in scaled
            and before[name].dtype.name not in HALVES  # rounding hides a decay; the check in float32 sees it
        ]
        self.decays = {name: self.decay(name, before, after) for name in weights}

    def decay(self, name: str, before: Arrays, after: Arrays) -> float:
        """The decay in the update of one weight: ``w' = w - rate · (m̂ / (√v̂ + ε) + decay · w)``, by least squares over ``w``.

        Without ``optimizer.bias_correction`` moments are taken as they are. Zero where LISA did not draw the weight's layer; of
        those that it draws, the correction begins anew.
        """
        old, new, *moments = (
            np.asarray(array, np.float64)
            for array in (before[name], after[name], *(after[f"{prefix}{name}"] for prefix in MOMENT_PREFIXES))
        )
        if np.array_equal(old, new):
            return 0.0
        powers = LAYER_POWERS if LAYER_POWERS[0] in after and is_of_layer(name) else POWERS
        left = [1 - float(after[power]) if self.corrects else 1.0 for power in powers]
        first, second = (moment / part for moment, part in zip(moments, left, strict=True))
        decayed = (old - new) / self.rate_of(name) - first / (np.sqrt(second) + self.epsilon)
        return float(np.sum(decayed * old) / np.sum(old * old))

    def decay_errors(self, cluster: Cluster, before: Sequence[Arrays]) -> Iterator[str]:
        """Weights that a rank decays otherwise; ``before`` has the parameters of every rank before the step."""
        for machine, old in zip(cluster.machines, before, strict=True):
            new = machine.values()
            for name, wanted in self.decays.items():
                if f"{MOMENT_PREFIXES[0]}{name}" not in new:
                    continue
                found = self.decay(name, old, new)
                if not abs(found - wanted) <= TOLERANCE:
                    rank = f"{name} on rank {machine.rank}"
                    yield f"weight decay of {rank}: {_text(found)}, {_text(wanted)} on a single device"


def _text(decay: float) -> str:
    """Three digits; no minus before a zero."""
    return f"{round(decay, 3) + 0.0:g}"


@dataclass(frozen=True)
class OnceMore:
    """What the logits of a step say of it in float64: ``problems`` of its loss, ``gradients`` of weights behind the layers."""

    problems: tuple[str, ...]
    gradients: Arrays


@dataclass(frozen=True)
class Reference:
    """A single device's training: its tables, weights that stay, state before it; after every step result, state, counts
    and what its logits say. ``begins``: weights when a run begins. ``applied``: of moments in codes the gradients of every step.
    ``largest``: attention logits of every step by layer. ``device``: the one that has trained, with its compiled step.
    """

    device: SingleDevice = field(repr=False)
    tables: Arrays
    frozen: Arrays
    initial: Arrays
    tasks: list[Task]
    results: list[StepResult]
    states: list[Arrays]
    counts: list[Arrays] = field(default_factory=list)
    losses: list[OnceMore] = field(default_factory=list)
    begins: Arrays = field(default_factory=dict)
    applied: list[Arrays] = field(default_factory=list)
    largest: list[Arrays] = field(default_factory=list)

    def updates(self, step: int) -> int:
        """Updates that are done behind step number ``step``."""
        return sum(not task.overflows for task in self.tasks[: step + 1])

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
    frozen, initial = device.frozen(), device.state()
    results, states, counts, losses = [], [initial], [], []
    gradients = AppliedGradients(one) if one.optimizer.block else None
    applied: list[Arrays] = []
    largest: list[Arrays] = []
    for task in work:
        results.append(device.step(task))
        applied.append(gradients.compute(task, states[-1]) if gradients is not None and not task.overflows else {})
        states.append(device.state())
        counts.append(device.counts())
        largest.append(device.largest_logits())
        around = ({**frozen, **states[-2]}, states[-1])
        losses.append(_once_more(one, task, results[-1], device.values(), counts[-1], *around))
    if not work[-1].overflows:
        before = {**frozen, **states[-2]}
        further = slope_problems(one, device, work[-1], results[-1].global_norm, before, states[-1])
        losses[-1] = replace(losses[-1], problems=(*losses[-1].problems, *further))
    return Reference(
        device,
        device.tables(),
        frozen,
        initial,
        work,
        results,
        states[1:],
        counts,
        losses,
        device.begins,
        applied,
        largest,
    )


def _once_more(
    config: RunConfig,
    task: Task,
    result: StepResult,
    values: StepValues,
    counted: Arrays,
    before: Arrays,
    after: Arrays,
) -> OnceMore:
    """The loss of a step, whose logits were finite, and where it updated weights some of its gradients."""
    problems = [
        *loss_problems(config, task.batch, result.loss, result.tokens, values),
        *balance_problems(config, values.routers, before),
    ]
    if values.routers is not None and not task.overflows:
        problems += share_problems(task.batch, values.routers, after)
    if not task.overflows:
        problems += bias_problems(config, counted, before, after)
    return OnceMore(tuple(problems), {} if task.overflows else last_gradients(config, task.batch, values, before))


def train_cluster(
    config: RunConfig, graphs: list[CompiledGraph], reference: Reference, mindspore_kernels: bool = False
) -> tuple[Comparison, ...]:
    """Trains the cluster from the same weights on the same batches, and compares after every step."""
    cluster = build_cluster(config, graphs, reference.given(0), mindspore_kernels)
    tolerance = tolerance_for(config)
    comparisons = []
    for number, task in enumerate(reference.tasks):
        if number and config.optimizer.block:
            cluster.load_state(reference.before(number))
        weights = [machine.values() for machine in cluster.machines]
        found = done_by(cluster, config, task)
        comparison = compared(config, reference, number, found, cluster_parts(cluster))
        comparison = replace(comparison, further=tuple(loss_on_both(reference, number)))
        if not task.overflows:
            rate_of = partial(task.rate_of, config)
            scaled = head_factors(config, reference.largest[number]) if reference.largest else {}
            updates = Updates(config.optimizer, rate_of, reference.before(number), reference.states[number], scaled)
            further = (
                *comparison.further,
                *updates.decay_errors(cluster, weights),
                *count_errors(cluster, reference.counts[number] if reference.counts else {}, tolerance.moments),
                *own_problems(config, reference, number),
            )
            comparison = replace(comparison, further=further)
        comparisons.append(comparison)
    return tuple(comparisons)


def compared(
    config: RunConfig, reference: Reference, number: int, found: ClusterStep, ranks: Mapping[int, Mapping[str, Part]]
) -> Comparison:
    """Step ``number``, and what ``ranks`` have behind it, held against the single device.

    Gradients that are not clipped are large beside Adam's epsilon.
    """
    task, state = reference.tasks[number], reference.states[number]
    tolerance = tolerance_for(config)
    if task.clips and config.runner_wrapper.use_clip_grad:
        return compare(reference.results[number], state, found, ranks, tolerance)
    explained = errors_from_moments(
        config.optimizer, tolerance, partial(task.rate_of, config), reference.updates(number), decode_state(state)
    )
    return compare(reference.results[number], state, found, ranks, tolerance, explained)


def done_by(cluster: Cluster, config: RunConfig, task: Task) -> ClusterStep:
    """One optimizer step of a cluster."""
    columns = columns_read(config, task.batch)
    with enlarged_logits(cluster, task.enlarged), clipping(cluster, config, task.clips):
        return cluster.step(columns, task.rate, task.scale, task.spoiled, group_rates=task.group_rates)


@contextmanager
def clipping(cluster: Cluster, config: RunConfig, clips: bool) -> Iterator[None]:
    """Unless it ``clips``, the threshold of clipping is one that no norm reaches inside: what the graph has computed of the
    threshold, a constant that is divided by the norm, is that many times as large.
    """
    asked = config.runner_wrapper.max_grad_norm
    if clips or not config.runner_wrapper.use_clip_grad:
        yield
        return
    for machine in cluster.machines:
        machine.fault = partial(_beyond_norms, frozenset(_thresholds(machine.graph, asked)), BEYOND_NORMS / asked)
    try:
        yield
    finally:
        for machine in cluster.machines:
            machine.fault = None


def _beyond_norms(names: Collection[str], factor: float, node: Node, result: Any) -> Any:
    return result * np.float32(factor) if node.name in names else result


def _thresholds(graph: CompiledGraph, asked: float) -> Iterator[str]:
    """The names of what is computed of the threshold where gradients are applied."""
    for node in graph.nodes():
        if node.op != CONSTANT and CLIPPING.search(node.scope):
            known = [graph.constants.get(name) for name in node.inputs]
            if any(_is_equal(one, np.float32(asked)) for one in known):
                yield node.name


def _is_equal(value: Any, number: np.float32) -> bool:
    return isinstance(value, (float, np.ndarray)) and np.ndim(value) == 0 and np.float32(value) == number


@contextmanager
def enlarged_logits(cluster: Cluster, factor: float) -> Iterator[None]:
    """The final norm's weight is ``factor`` times as large inside, wherever there is one."""
    held = [machine.parameters[FINAL_NORM] for machine in cluster.machines if FINAL_NORM in machine.parameters]
    begins = [parameter.value for parameter in held]
    if factor != 1:
        for parameter in held:
            parameter.value = parameter.value * np.float32(factor)
    yield
    if factor != 1:
        for parameter, value in zip(held, begins, strict=True):
            parameter.value = value  # the step was skipped


def count_errors(cluster: Cluster, wanted: Arrays, tolerance: float) -> Iterator[str]:
    """Counters of a step that some rank has otherwise, or none has; zeros are those of layers on another stage."""
    for name, whole in wanted.items():
        found = {
            machine.rank: machine.parameters[name].value for machine in cluster.machines if name in machine.parameters
        }
        counted = {rank: value for rank, value in found.items() if value.any()}
        if whole.any() and not counted:
            yield f"{name}: no rank has counted anything"
        for rank, value in counted.items():
            error, largest = np.max(np.abs(value - whole)), np.max(np.abs(whole))
            if not error <= tolerance * largest:
                yield f"{name} on rank {rank}: off by {error:.2e}, {error / max(largest, TINY):.2e} of its largest"
                break


def own_problems(config: RunConfig, reference: Reference, step: int) -> Iterator[str]:
    """Where the single device itself does not do the update that the YAML asks for."""
    done = reference.updates(step)
    task, norm = reference.tasks[step], reference.results[step].global_norm
    rate_of, before, after = partial(task.rate_of, config), reference.before(step), reference.states[step]
    known = reference.losses[step].gradients if reference.losses else {}
    applied = reference.applied[step] if reference.applied else {}
    largest = reference.largest[step] if reference.largest else {}
    for problem in update_problems(config, done, rate_of, norm, before, after, known, task.clips, applied, largest):
        yield f"{problem} {ON_BOTH}"


def loss_on_both(reference: Reference, step: int) -> Iterator[str]:
    """Where the single device's own loss is not that of its logits."""
    for problem in reference.losses[step].problems if reference.losses else ():
        yield f"{problem} {ON_BOTH}"


def columns_read(config: RunConfig, batch: Mapping[str, np.ndarray]) -> Arrays:
    """The columns of a batch that the graphs of a configuration are given; where it has none, every row is one document."""
    return dict(with_document_columns(batch, input_columns(config)))


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
    from mindllm.train.optimizers.spikes import limits_of_step
    from mindllm.train.watched import summed_kinds

    stages, limits = mesh_of(config).pipeline_stage, len(limits_of_step(config))
    watches = bool(summed_kinds(config.monitor_config.watched()))
    groups = len(config.grouped_lr_schedule.grouped)
    return Cluster(
        graphs,
        stages,
        input_slices(config),
        state,
        mindspore_kernels,
        observer,
        limits,
        watches,
        groups,
        config.last_stage,
    )
