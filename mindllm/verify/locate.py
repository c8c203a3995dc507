"""Judge the comparisons of all steps, and locate where a difference begins.

The step that differs first is executed again, with the value of every operator recorded. Three sides are compared: the model on
one CPU is the reference. The same model compiled for one device of the accelerator has the operators of the ranks without their
exchanges. If it differs already, all ranks share the mistake. Otherwise the ranks are compared with it, operator by operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import FIRST_MOMENTS, is_state, updated_weights
from mindllm.compiled.execute.cluster import Cluster, ClusterStep
from mindllm.compiled.execute.comparer import Comparer
from mindllm.compiled.execute.records import Record, Recorder
from mindllm.compiled.execute.state import ACCUMULATORS, initial_parts
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.rank.compile_ranks import compile_ranks
from mindllm.config import RunConfig, override_config
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.parallel.layout import mesh_of
from mindllm.reduced_runs.model import single_device
from mindllm.terminal.progress import Progress, unwatched
from mindllm.verify.compare import TOLERANCES, Comparison, cluster_parts, is_loss_problem
from mindllm.verify.initial import table_problems, weight_problems
from mindllm.verify.outcome import Outcome
from mindllm.verify.scope import recorded_bytes
from mindllm.verify.side import BOTH_SIDES, Reference, build_cluster, compare_step, run_step

VALUE_TOLERANCES = {"float32": (1e-5, 1e-6), "bfloat16": (5e-2,), "float16": (1e-2,)}
"""By compute dtype, relative to the largest element of a value. If no operator exceeds the first, the next is used."""
DIRECTION_TOLERANCE = 1e-3
"""Of a gradient, after a common factor is removed. Clipping is such a factor."""
NAMES_SHOWN = 4
ADDS = "AssignAdd"

LARGE_LOGITS = (
    "the loss of a skipped step whose logits exceed 88: their exponents are infinite unless the largest logit is subtracted "
    "first, over all ranks that share the vocabulary"
)
IN_BOTH = "in both sides: the ranks match the single device, and in float64 its logits and moments give another loss or update"
NOT_LOCATED_IN_PIECES = (
    "not located: operators of sequences in pieces (seq_split_num) have other rows than those of whole ones"
)
NOT_IN_OPERATORS = (
    "every operator of the step matches the single device; what differs is kept between steps outside of weights and optimizer "
    "state, or a weight is not updated"
)
ONE_RANK = (
    "a gradient overflowed on one rank only, and not all ranks know: whether gradients are finite must be reduced over all "
    "ranks, like their norm"
)
SHARED = (
    "in what all ranks share: the model compiled for one accelerator, without exchanges, already differs from a CPU"
)


def judge(
    config: RunConfig,
    graphs: list[CompiledGraph],
    reference: Reference,
    comparisons: tuple[Comparison, ...],
    cache: Path | None = None,
    progress: Progress = unwatched,
) -> Outcome:
    """Return the outcome of the comparisons of all steps. If a step differs, it names the operator where that begins."""
    from mindllm.parallel.build import kernels_of

    positions = kernels_of(config).positions(config.model.config.seq_length)
    at_start = (
        *table_problems(graphs, reference.tables, positions),
        *weight_problems(graphs, config.seed, reference.begins),
    )
    for step, comparison in enumerate(comparisons):
        if problems := comparison.problems():
            progress("locating the first operator that differs")
            loss_only = all(map(is_loss_problem, problems))
            if all(problem.endswith(BOTH_SIDES) for problem in problems):
                place = IN_BOTH
            elif reference.tasks[step].spoiled is not None and loss_only:
                place = LARGE_LOGITS
            else:
                place = locate_within_memory(config, graphs, reference, step, cache)
            lines = tuple(f"step {step + 1}: {problem}" for problem in problems)
            return Outcome(config, comparisons, (*at_start, *lines), len(graphs), place)
    return Outcome(config, comparisons, at_start, len(graphs))


def locate_within_memory(
    config: RunConfig, graphs: list[CompiledGraph], reference: Reference, step: int, cache: Path | None
) -> str:
    """Locate the difference in a step, or return why that is not possible: it takes the values of every operator."""
    if config.parallel_config.seq_split_num > 1:
        return NOT_LOCATED_IN_PIECES
    with MemoryClaim() as claim:
        if not claim.fits(size := recorded_bytes(config)):
            return f"not located: that takes about {gibibytes(size)}, and there are {claim.describe()}: {ADVICE}"
        claim.take(size)
        return locate(config, graphs, reference, step, cache)


@dataclass(frozen=True)
class _Side:
    """A recorded step, and its comparison with the reference."""

    cluster: Cluster
    recorder: Recorder
    step: ClusterStep
    comparison: Comparison


def one_device_graph(config: RunConfig, cache: Path | None = None) -> tuple[RunConfig, CompiledGraph]:
    """Compile the model for one device of the accelerator: the operators of the ranks without exchanges."""
    alone = override_config(single_device(config), {"context.device_target": "Ascend"})
    return alone, compile_ranks(alone, cache)[0]


def locate(
    config: RunConfig,
    graphs: Sequence[CompiledGraph],
    reference: Reference,
    step: int,
    cache: Path | None = None,
    alone: tuple[RunConfig, CompiledGraph] | None = None,
) -> str:
    """Describe where the difference in step ``step`` (from 0) begins.

    Args:
        config: the small run.
        graphs: of its ranks.
        reference: the single device's training.
        step: the first step that differs.
        cache: directory of compiled graphs.
        alone: result of :func:`one_device_graph`, if it is available.
    """
    if reference.tasks[step].spoiled is not None:
        return ONE_RANK
    single, graph = alone or one_device_graph(config, cache)
    with np.errstate(all="ignore"):
        device = _record(single, [graph], reference, step)
        if problems := device.comparison.problems():
            return _describe_shared(problems, device, reference, step)
        ranks = _record(config, graphs, reference, step)
        if not ranks.comparison.problems():
            return _locate_in_state(config, graphs, reference, step) or NOT_IN_OPERATORS
        return _locate_in_operators(config, graphs, ranks, device) or NOT_IN_OPERATORS


def suspected(
    config: RunConfig,
    graphs: Sequence[CompiledGraph],
    reference: Reference,
    step: int,
    alone: tuple[RunConfig, CompiledGraph],
) -> str:
    """Return what :func:`locate` would name if all results of step ``step`` were wrong; of correct ranks, an empty string."""
    with np.errstate(all="ignore"):
        device, ranks = _record(alone[0], [alone[1]], reference, step), _record(config, graphs, reference, step)
        comparer = _comparer(config, graphs, ranks, device, VALUE_TOLERANCES[config.model.config.compute_dtype][0])
        difference = comparer.first_difference(record for record in ranks.recorder.records if record.assigns)
    return difference.describe() if difference else ""


def _record(config: RunConfig, graphs: Sequence[CompiledGraph], reference: Reference, step: int) -> _Side:
    recorder = Recorder()
    cluster = build_cluster(config, list(graphs), reference.initial_state(step), observer=recorder)
    result = run_step(cluster, config, reference.tasks[step])
    return _Side(cluster, recorder, result, compare_step(config, reference, step, result, cluster_parts(cluster)))


def _comparer(
    config: RunConfig, graphs: Sequence[CompiledGraph], ranks: _Side, device: _Side, tolerance: float
) -> Comparer:
    return Comparer(ranks.recorder.records, device.recorder.records, graphs, mesh_of(config), tolerance)


def _locate_in_operators(config: RunConfig, graphs: Sequence[CompiledGraph], ranks: _Side, device: _Side) -> str:
    """Describe the first operator of the ranks that differs, or the result that no operator changes."""
    if idle := _idle_accumulators(ranks):
        return f"no gradient is added to {', '.join(idle[:NAMES_SHOWN])}"
    wrong, unchanged = _wrong_results(ranks)
    for tolerance in VALUE_TOLERANCES[config.model.config.compute_dtype]:
        comparer = _comparer(config, graphs, ranks, device, tolerance)
        if difference := comparer.first_difference(wrong):
            return difference.describe()
    if unchanged:
        return f"no operator of the step changes {', '.join(unchanged[:NAMES_SHOWN])}"
    return comparer.explained(wrong[0]).describe() if wrong else ""


def _idle_accumulators(side: _Side) -> list[str]:
    """Return the accumulators of wrong weights to which no operator of the step adds."""
    added = {(record.rank, record.parameter) for record in side.recorder.records if record.node.op == ADDS}
    wrong = {error.name for error in side.comparison.wrong_tensors()}
    names = [f"{ACCUMULATORS}{weight}" for weight in sorted({*wrong, *updated_weights(wrong)})]
    return [
        f"{name} on rank {machine.rank}"
        for name in names
        for machine in side.cluster.machines
        if name in machine.parameters and (machine.rank, name) not in added
    ]


def _wrong_results(side: _Side) -> tuple[list[Record], list[str]]:
    """Return the operators that yield wrong results of the step, and the wrong results that no operator yields."""
    records, unchanged = [], []
    for error in side.comparison.wrong_tensors():
        record = side.recorder.changer(error.rank, error.name)
        if record is None:
            unchanged.append(f"{error.name} on rank {error.rank}")
        else:
            records.append(record)
    outputs = (side.recorder.maker(rank, value) for rank, value in _wrong_outputs(side))
    return [*records, *filter(None, outputs)], unchanged


def _wrong_outputs(side: _Side) -> Iterator[tuple[int, Any]]:
    """Yield loss, norm, finite flag and token count of the ranks on which they are wrong."""
    single, tolerance = side.comparison.single, side.comparison.tolerance
    last_stage = len(side.cluster.machines) - side.cluster.stage_devices
    for rank, (loss, norm, finite, tokens) in side.cluster.returned.items():
        if not single.overflow:
            if rank >= last_stage and not _is_near(loss, single.loss, tolerance.loss):
                yield rank, loss
            if not _is_near(norm, single.global_norm, tolerance.norm):
                yield rank, norm
        if bool(finite) == single.overflow:
            yield rank, finite
        if int(tokens) != single.tokens:
            yield rank, tokens


def _is_near(value: Any, expected: float, tolerance: float) -> bool:
    return abs(float(value) - expected) <= tolerance * abs(expected)


def _locate_in_state(config: RunConfig, graphs: Sequence[CompiledGraph], reference: Reference, step: int) -> str:
    """Describe the state of ranks that is wrong after the steps before ``step``; empty if none is."""
    cluster = build_cluster(config, list(graphs), reference.initial_state(0))
    for task in reference.tasks[:step]:
        run_step(cluster, config, task)
    tolerances, state = TOLERANCES[config.model.config.compute_dtype], reference.initial_state(step)
    wrong = []
    for machine in cluster.machines:
        for name, expected in initial_parts(machine.graph, state).items():
            if name not in state and not name.startswith(ACCUMULATORS):
                continue
            tolerance = tolerances.moments if is_state(name) else tolerances.weights
            error = np.abs(np.subtract(machine.parameters[name].value, expected, dtype=np.float64))
            largest = float(np.max(np.abs(expected), initial=0.0))
            if not np.max(error, initial=0.0) <= tolerance * largest:
                wrong.append(f"{name} on rank {machine.rank}")
    return f"in state that ranks keep between steps: {_first_names(wrong)}" if wrong else ""


def _describe_shared(problems: Sequence[str], device: _Side, reference: Reference, step: int) -> str:
    """Describe a difference that one device has too, and the weights whose gradients differ by more than a factor."""
    lines = [f"{SHARED}: {problems[0]}"]
    if turned := _turned_gradients(device.cluster.machines[0].values(), reference, step):
        lines.append(f"gradients differ of {_first_names(turned)}")
    return "\n  ".join(lines)


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"


def _turned_gradients(values: Mapping[str, np.ndarray], reference: Reference, step: int) -> list[str]:
    """Return the weights whose first moment changed in another direction than on the CPU."""
    before, after = reference.before(step), reference.states[step]
    turned = []
    for name in (name for name in after if name.startswith(FIRST_MOMENTS) and name in values):
        old = before.get(name, np.zeros_like(after[name]))
        expected, change = (np.asarray(array - old, np.float64) for array in (after[name], values[name]))
        factor = float(np.vdot(change, expected)) / (float(np.vdot(expected, expected)) or 1.0)
        if not np.max(np.abs(change - factor * expected)) <= DIRECTION_TOLERANCE * np.max(np.abs(change)):
            turned += updated_weights([name])
    return turned
