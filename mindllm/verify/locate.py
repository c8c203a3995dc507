"""Where a difference begins: the step that differs first once more, with every value of every operator kept.

Three sides are held together. The model on one CPU is the reference. The same model compiled for one device of the accelerator
has the operators of the ranks without their exchanges: where it already differs, the mistake is in what all ranks have from the
model, and no exchange is to blame. Where it does not, the ranks are held against it, operator by operator.
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
from mindllm.parallel.layout import mesh_of
from mindllm.reduced_runs.model import single_device
from mindllm.verify.compare import TOLERANCES, Comparison, Tolerance, cluster_parts
from mindllm.verify.side import Reference, build_cluster, compared, done_by

TOLERANCES_OF_VALUES = {"float32": (1e-5, 1e-6), "bfloat16": (5e-2,), "float16": (1e-2,)}
"""By compute dtype, relative to the largest magnitude of a value; where nothing is found by the first, the next."""
NOWHERE = (
    "every operator of the step computes what it does on a single device; what differs is what a rank keeps from one step to "
    "the next beside weights and optimizer state, or that a weight is not updated"
)
ONE_RANK = (
    "a gradient overflowed on one rank alone, and not all ranks were told of it: whether gradients are finite must be reduced "
    "over all ranks, as their norm is"
)
SHARED = (
    "in what all ranks share: the model compiled for one device of the accelerator, without any exchange, already computes "
    "something else than on a CPU"
)
DIRECTION = 1e-3
"""Of a gradient, what a common factor leaves; clipping is one."""
MOST_NAMES = 4
ADDS = "AssignAdd"


@dataclass(frozen=True)
class _Side:
    """A step that was executed with every value kept, and how it compares with the reference."""

    cluster: Cluster
    recorder: Recorder
    step: ClusterStep
    comparison: Comparison


def one_device_graph(config: RunConfig, cache: Path | None = None) -> tuple[RunConfig, CompiledGraph]:
    """The same model compiled for one device of the accelerator: the operators of the cluster without its exchanges."""
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
    """Describes where it begins that step number ``step`` (from 0) differs.

    ``alone``: what :func:`one_device_graph` gives, where it is known.
    """
    if reference.tasks[step].spoiled is not None:
        return ONE_RANK
    single, graph = alone or one_device_graph(config, cache)
    with np.errstate(all="ignore"):
        device = _executed(single, [graph], reference, step)
        if problems := device.comparison.problems():
            return _shared(problems, device, reference, step)
        ranks = _executed(config, graphs, reference, step)
        if not ranks.comparison.problems():
            return _kept(config, graphs, reference, step) or NOWHERE
        return _among_ranks(config, graphs, ranks, device) or NOWHERE


def suspected(
    config: RunConfig,
    graphs: Sequence[CompiledGraph],
    reference: Reference,
    step: int,
    alone: tuple[RunConfig, CompiledGraph],
) -> str:
    """What :func:`locate` would name if everything that step number ``step`` updates were wrong: of correct ranks nothing, an
    empty string.
    """
    with np.errstate(all="ignore"):
        device, ranks = _executed(alone[0], [alone[1]], reference, step), _executed(config, graphs, reference, step)
        tolerance = TOLERANCES_OF_VALUES[config.model.config.compute_dtype][0]
        records = ranks.recorder.records
        comparer = Comparer(records, device.recorder.records, graphs, mesh_of(config), tolerance)
        found = comparer.first_difference(record for record in records if record.assigns)
    return found.describe() if found else ""


def _executed(config: RunConfig, graphs: Sequence[CompiledGraph], reference: Reference, step: int) -> _Side:
    task, recorder = reference.tasks[step], Recorder()
    cluster = build_cluster(config, list(graphs), reference.given(step), observer=recorder)
    done = done_by(cluster, config, task)
    return _Side(cluster, recorder, done, compared(config, reference, step, done, cluster_parts(cluster)))


def _among_ranks(config: RunConfig, graphs: Sequence[CompiledGraph], ranks: _Side, device: _Side) -> str:
    """The first operator of the ranks that differs, or the result that none of them changes."""
    if idle := _idle_accumulators(ranks):
        return f"no gradient is added to {', '.join(idle[:MOST_NAMES])}"
    wrong, untouched = _wrong_results(ranks)
    for tolerance in TOLERANCES_OF_VALUES[config.model.config.compute_dtype]:
        comparer = Comparer(ranks.recorder.records, device.recorder.records, graphs, mesh_of(config), tolerance)
        if found := comparer.first_difference(wrong):
            return found.describe()
    if untouched:
        return f"no operator of the step changes {', '.join(untouched[:MOST_NAMES])}"
    return comparer.explained(wrong[0]).describe() if wrong else ""


def _idle_accumulators(side: _Side) -> list[str]:
    """Accumulators of weights that come out wrong to which no operator of the step adds."""
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
    """The operators that yield what is wrong behind the step, and what is wrong though no operator yields it."""
    records, untouched = [], []
    for error in side.comparison.wrong_tensors():
        record = side.recorder.changer(error.rank, error.name)
        if record is None:
            untouched.append(f"{error.name} on rank {error.rank}")
        else:
            records.append(record)
    found = (side.recorder.maker(rank, value) for rank, value in _wrong_outputs(side))
    return [*records, *filter(None, found)], untouched


def _wrong_outputs(side: _Side) -> Iterator[tuple[int, Any]]:
    """Loss, norm, whether all is finite and tokens, of the ranks on which they are wrong."""
    single, allowed = side.comparison.single, side.comparison.tolerance
    last = len(side.cluster.machines) - side.cluster.stage_devices
    for rank, (loss, norm, finite, tokens) in side.cluster.returned.items():
        if not single.overflow:
            if rank >= last and not _near(loss, single.loss, allowed.loss):
                yield rank, loss
            if not _near(norm, single.global_norm, allowed.norm):
                yield rank, norm
        if bool(finite) == single.overflow:
            yield rank, finite
        if int(tokens) != single.tokens:
            yield rank, tokens


def _near(found: Any, wanted: float, tolerance: float) -> bool:
    return abs(float(found) - wanted) <= tolerance * abs(wanted)


def _kept(config: RunConfig, graphs: Sequence[CompiledGraph], reference: Reference, step: int) -> str:
    """What ranks keep otherwise than they should when the steps before ``step`` have gone by; empty where nothing."""
    cluster = build_cluster(config, list(graphs), reference.given(0))
    for task in reference.tasks[:step]:
        done_by(cluster, config, task)
    tolerance, given = TOLERANCES[config.model.config.compute_dtype], reference.given(step)
    wrong = [
        f"{name} on rank {machine.rank}"
        for machine in cluster.machines
        for name, wanted in initial_parts(machine.graph, given).items()
        if (name in given or name.startswith(ACCUMULATORS))
        and not _same(machine.parameters[name].value, wanted, _allowed(name, tolerance))
    ]
    if not wrong:
        return ""
    more = f" and {len(wrong) - MOST_NAMES} more" if len(wrong) > MOST_NAMES else ""
    return (
        f"in what ranks keep from one step to the next: {', '.join(wrong[:MOST_NAMES])}{more} is not what it should be"
    )


def _allowed(name: str, tolerance: Tolerance) -> float:
    return tolerance.moments if is_state(name) else tolerance.weights


def _same(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> bool:
    largest = float(np.max(np.abs(wanted), initial=0.0))
    return bool(np.max(np.abs(np.subtract(found, wanted, dtype=np.float64)), initial=0.0) <= tolerance * largest)


def _shared(problems: Sequence[str], device: _Side, reference: Reference, step: int) -> str:
    """That one device differs, too, and the weights whose gradients differ by more than a factor."""
    lines = [f"{SHARED}: {problems[0]}"]
    wrong = _turned(device.cluster.machines[0].values(), reference, step)
    if wrong:
        more = f" and {len(wrong) - MOST_NAMES} more" if len(wrong) > MOST_NAMES else ""
        lines.append(f"gradients differ of {', '.join(wrong[:MOST_NAMES])}{more}")
    return "\n  ".join(lines)


def _turned(values: Mapping[str, np.ndarray], reference: Reference, step: int) -> list[str]:
    """Weights whose first moment changed in another direction than on the CPU."""
    before, after = reference.before(step), reference.states[step]
    wrong = []
    for name in (name for name in after if name.startswith(FIRST_MOMENTS) and name in values):
        old = before.get(name, np.zeros_like(after[name]))
        wanted, found = (np.asarray(array - old, np.float64) for array in (after[name], values[name]))
        factor = float(np.vdot(found, wanted)) / (float(np.vdot(wanted, wanted)) or 1.0)
        if not np.max(np.abs(found - factor * wanted)) <= DIRECTION * np.max(np.abs(found)):
            wrong += updated_weights([name])
    return wrong
