"""Train both sides: a single CPU device, and the ranks from the same weights on the same batches.

Decays of weights are read from the updates. In half precision, rounding changes gradients by more than a decay changes weights.
But weights and moments are fp32 on both sides. What remains of an update without Adam's part, which follows from the new
moments, is the decay.
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
from mindllm.verify.recomputed.loss import last_gradients, loss_problems
from mindllm.verify.recomputed.slope import slope_problems
from mindllm.verify.recomputed.step_values import StepValues
from mindllm.verify.recomputed.update import head_factors, update_problems
from mindllm.verify.single import BEYOND_NORMS, FINAL_NORM, Arrays, SingleDevice, Task, tasks

DECAY_TOLERANCE = 1e-3
"""A decay is a number such as 0.1. Rounding of fp32 changes it by about 1e-5."""
SEED = 1
TINY = 1e-30
CLIPPING = re.compile(r"update-ApplyGradients/[^/]+$")
"""Scopes of the operators that clip gradients."""
BOTH_SIDES = "(on a single device too)"
"""Ends a problem that the ranks and the single device share."""


class Updates:
    """Decays in an optimizer step of a single device.

    Weights with projected moments (GaLore) are left out, because their update does not follow from moments alone.

    Args:
        optimizer: of the run.
        rate_of: returns the learning rate of a weight.
        before: weights and state before the step.
        after: weights and state after it.
        scaled: weights that QK-clip has scaled, which are left out too.
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
            and before[name].dtype.name not in HALVES  # rounding hides a decay; a check in float32 shows it
        ]
        self.decays = {name: self.decay(name, before, after) for name in weights}

    def decay(self, name: str, before: Arrays, after: Arrays) -> float:
        """Return the decay in an update ``w' = w - rate · (m̂ / (√v̂ + ε) + decay · w)``, by least squares over ``w``.

        Without ``optimizer.bias_correction`` moments count uncorrected. The decay is zero if LISA did not sample the weight's
        layer; in a sampled layer the correction starts again.
        """
        old, new, *moments = (
            np.asarray(array, np.float64)
            for array in (before[name], after[name], *(after[f"{prefix}{name}"] for prefix in MOMENT_PREFIXES))
        )
        if np.array_equal(old, new):
            return 0.0
        powers = LAYER_POWERS if LAYER_POWERS[0] in after and is_of_layer(name) else POWERS
        corrections = [1 - float(after[power]) if self.corrects else 1.0 for power in powers]
        first, second = (moment / correction for moment, correction in zip(moments, corrections, strict=True))
        decayed = (old - new) / self.rate_of(name) - first / (np.sqrt(second) + self.epsilon)
        return float(np.sum(decayed * old) / np.sum(old * old))

    def decay_errors(self, cluster: Cluster, before: Sequence[Arrays]) -> Iterator[str]:
        """Yield weights that a rank decays differently. ``before``: parameters of every rank before the step."""
        for machine, old in zip(cluster.machines, before, strict=True):
            new = machine.values()
            for name, expected in self.decays.items():
                if f"{MOMENT_PREFIXES[0]}{name}" not in new:
                    continue
                decay = self.decay(name, old, new)
                if not abs(decay - expected) <= DECAY_TOLERANCE:
                    # adding zero removes the sign of a negative zero
                    found, single = (f"{round(value, 3) + 0.0:g}" for value in (decay, expected))
                    yield f"weight decay of {name} on rank {machine.rank}: {found}, {single} on a single device"


@dataclass(frozen=True)
class Float64Recheck:
    """Results of a step in float64, from its logits: ``problems`` of the loss, ``gradients`` of weights after the layers."""

    problems: tuple[str, ...]
    gradients: Arrays


@dataclass(frozen=True)
class Reference:
    """Training of a single device.

    Attributes:
        device: with its compiled step.
        tables: constants of the model, such as rotary angles.
        frozen: weights that training does not change.
        initial: weights and optimizer state before the first step.
        tasks: the steps.
        results: of each step.
        states: weights and optimizer state after each step.
        counts: counters of each step.
        losses: each step again in float64.
        begins: weights with which a run starts.
        applied: gradients of each step, if moments are in codes.
        largest: largest attention logits of each step, by layer.
    """

    device: SingleDevice = field(repr=False)
    tables: Arrays
    frozen: Arrays
    initial: Arrays
    tasks: list[Task]
    results: list[StepResult]
    states: list[Arrays]
    counts: list[Arrays] = field(default_factory=list)
    losses: list[Float64Recheck] = field(default_factory=list)
    begins: Arrays = field(default_factory=dict)
    applied: list[Arrays] = field(default_factory=list)
    largest: list[Arrays] = field(default_factory=list)

    def updates(self, step: int) -> int:
        """Return the number of updates up to step ``step`` (from 0)."""
        return sum(not task.overflows for task in self.tasks[: step + 1])

    def before(self, step: int) -> Arrays:
        """Return weights and optimizer state before step ``step`` (from 0)."""
        return self.states[step - 1] if step else self.initial

    def initial_state(self, step: int) -> Arrays:
        """Return the state for a cluster that starts with step ``step``. At the start of a run it has its own optimizer state."""
        if step:
            return {**self.frozen, **self.before(step)}
        return {**self.frozen, **{name: item for name, item in self.initial.items() if not is_state(name)}}


def train_single(config: RunConfig, steps: int) -> Reference:
    """Train a single CPU device."""
    from mindllm.train.device import set_up_device

    one = single_device(config)
    set_up_device(one)
    device = SingleDevice(one)
    steps_to_do = tasks(config, steps, SEED)
    frozen, initial = device.frozen(), device.state()
    results, states, counts, losses = [], [initial], [], []
    gradients = AppliedGradients(one) if one.optimizer.block else None
    applied: list[Arrays] = []
    largest: list[Arrays] = []
    for task in steps_to_do:
        results.append(device.step(task))
        applied.append(gradients.compute(task, states[-1]) if gradients is not None and not task.overflows else {})
        states.append(device.state())
        counts.append(device.counts())
        largest.append(device.largest_logits())
        before = {**frozen, **states[-2]}
        losses.append(_recheck(one, task, results[-1], device.values(), counts[-1], before, states[-1]))
    if not steps_to_do[-1].overflows:
        before = {**frozen, **states[-2]}
        problems = slope_problems(one, device, steps_to_do[-1], results[-1].global_norm, before, states[-1])
        losses[-1] = replace(losses[-1], problems=(*losses[-1].problems, *problems))
    return Reference(
        device,
        device.tables(),
        frozen,
        initial,
        steps_to_do,
        results,
        states[1:],
        counts,
        losses,
        device.begins,
        applied,
        largest,
    )


def _recheck(
    config: RunConfig,
    task: Task,
    result: StepResult,
    values: StepValues,
    counted: Arrays,
    before: Arrays,
    after: Arrays,
) -> Float64Recheck:
    """Compute the loss of a step in float64 from its finite logits, and some of its gradients if it updated weights."""
    problems = [
        *loss_problems(config, task.batch, result.loss, result.tokens, values),
        *balance_problems(config, values.routers, before),
    ]
    if values.routers is not None and not task.overflows:
        problems += share_problems(task.batch, values.routers, after)
    if not task.overflows:
        problems += bias_problems(config, counted, before, after)
    return Float64Recheck(tuple(problems), {} if task.overflows else last_gradients(config, task.batch, values, before))


def train_cluster(
    config: RunConfig, graphs: list[CompiledGraph], reference: Reference, mindspore_kernels: bool = False
) -> tuple[Comparison, ...]:
    """Train the ranks from the same weights on the same batches, and compare every step."""
    cluster = build_cluster(config, graphs, reference.initial_state(0), mindspore_kernels)
    tolerance = tolerance_for(config)
    comparisons = []
    for number, task in enumerate(reference.tasks):
        if number and config.optimizer.block:
            cluster.load_state(reference.before(number))
        weights = [machine.values() for machine in cluster.machines]
        result = run_step(cluster, config, task)
        comparison = compare_step(config, reference, number, result, cluster_parts(cluster))
        further = [*shared_loss_problems(reference, number)]
        if not task.overflows:
            rate_of = partial(task.rate_of, config)
            scaled = head_factors(config, reference.largest[number]) if reference.largest else {}
            updates = Updates(config.optimizer, rate_of, reference.before(number), reference.states[number], scaled)
            further += updates.decay_errors(cluster, weights)
            further += count_errors(cluster, reference.counts[number] if reference.counts else {}, tolerance.moments)
            further += shared_update_problems(config, reference, number)
        comparisons.append(replace(comparison, further=tuple(further)))
    return tuple(comparisons)


def compare_step(
    config: RunConfig, reference: Reference, number: int, result: ClusterStep, ranks: Mapping[int, Mapping[str, Part]]
) -> Comparison:
    """Compare step ``number``, and the parts of ``ranks`` after it, with the single device.

    Gradients that are not clipped are large compared with Adam's epsilon, and rounding of moments is visible in weights.
    """
    task, state = reference.tasks[number], reference.states[number]
    tolerance = tolerance_for(config)
    if task.clips and config.runner_wrapper.use_clip_grad:
        return compare(reference.results[number], state, result, ranks, tolerance)
    allowed = errors_from_moments(
        config.optimizer, tolerance, partial(task.rate_of, config), reference.updates(number), decode_state(state)
    )
    return compare(reference.results[number], state, result, ranks, tolerance, allowed)


def run_step(cluster: Cluster, config: RunConfig, task: Task) -> ClusterStep:
    """Execute an optimizer step on all ranks."""
    # without document columns every row is one document
    columns = dict(with_document_columns(task.batch, input_columns(config)))
    with enlarged_logits(cluster, task.enlarged), clipping(cluster, config, task.clips):
        return cluster.step(columns, task.rate, task.scale, task.spoiled, group_rates=task.group_rates)


@contextmanager
def clipping(cluster: Cluster, config: RunConfig, clips: bool) -> Iterator[None]:
    """Raise the clipping threshold inside the context beyond any norm, unless the step ``clips``.

    The threshold is a constant of the graph. The results of operators that read it are scaled instead.
    """
    threshold = config.runner_wrapper.max_grad_norm
    if clips or not config.runner_wrapper.use_clip_grad:
        yield
        return
    for machine in cluster.machines:
        machine.fault = partial(
            _scale_result, frozenset(_threshold_readers(machine.graph, threshold)), BEYOND_NORMS / threshold
        )
    try:
        yield
    finally:
        for machine in cluster.machines:
            machine.fault = None


def _scale_result(names: Collection[str], factor: float, node: Node, result: Any) -> Any:
    return result * np.float32(factor) if node.name in names else result


def _threshold_readers(graph: CompiledGraph, threshold: float) -> Iterator[str]:
    """Yield the names of the operators that read the threshold when gradients are applied."""
    for node in graph.nodes():
        if node.op == CONSTANT or not CLIPPING.search(node.scope):
            continue
        for name in node.inputs:
            value = graph.constants.get(name)
            is_scalar = isinstance(value, (float, np.ndarray)) and np.ndim(value) == 0
            if is_scalar and np.float32(value) == np.float32(threshold):
                yield node.name
                break


@contextmanager
def enlarged_logits(cluster: Cluster, factor: float) -> Iterator[None]:
    """Multiply the final norm's weight on every rank inside the context, for a step that is skipped."""
    norms = [machine.parameters[FINAL_NORM] for machine in cluster.machines if FINAL_NORM in machine.parameters]
    values = [parameter.value for parameter in norms]
    if factor != 1:
        for parameter in norms:
            parameter.value = parameter.value * np.float32(factor)
    yield
    if factor != 1:
        for parameter, value in zip(norms, values, strict=True):
            parameter.value = value


def count_errors(cluster: Cluster, expected: Arrays, tolerance: float) -> Iterator[str]:
    """Yield counters of a step that differ on some rank, or that no rank has. Counters of layers on another stage are zero."""
    for name, count in expected.items():
        counts = {
            machine.rank: machine.parameters[name].value for machine in cluster.machines if name in machine.parameters
        }
        not_zero = {rank: value for rank, value in counts.items() if value.any()}
        if count.any() and not not_zero:
            yield f"{name}: no rank has counted anything"
        for rank, value in not_zero.items():
            error, largest = np.max(np.abs(value - count)), np.max(np.abs(count))
            if not error <= tolerance * largest:
                yield f"{name} on rank {rank}: off by {error:.2e}, {error / max(largest, TINY):.2e} of its largest"
                break


def shared_update_problems(config: RunConfig, reference: Reference, step: int) -> Iterator[str]:
    """Yield where the single device's own update does not follow the YAML."""
    updates = reference.updates(step)
    task, norm = reference.tasks[step], reference.results[step].global_norm
    rate_of, before, after = partial(task.rate_of, config), reference.before(step), reference.states[step]
    known = reference.losses[step].gradients if reference.losses else {}
    applied = reference.applied[step] if reference.applied else {}
    largest = reference.largest[step] if reference.largest else {}
    for problem in update_problems(config, updates, rate_of, norm, before, after, known, task.clips, applied, largest):
        yield f"{problem} {BOTH_SIDES}"


def shared_loss_problems(reference: Reference, step: int) -> Iterator[str]:
    """Yield where the single device's own loss does not follow from its logits."""
    for problem in reference.losses[step].problems if reference.losses else ():
        yield f"{problem} {BOTH_SIDES}"


def build_cluster(
    config: RunConfig,
    graphs: list[CompiledGraph],
    state: Mapping[str, Any],
    mindspore_kernels: bool = False,
    observer: Observer | None = None,
) -> Cluster:
    """Return a cluster with the weights and optimizer state in ``state``: arrays, or tensors of a checkpoint.

    Parameters that ``state`` leaves out start as the graphs say.
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
