"""Tables of what layers and stages cost, and of what the dry run says of a plan.

Behind them: what simulated runs were shared out to, for people and for programs, and the plan as the keys of a YAML of
MindFormers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindllm.planning.costs.configured import Configured
from mindllm.planning.costs.small_runs import ALL_RECOMPUTED
from mindllm.planning.from_programs.simulated_costs import SimulatedFit
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem
from mindllm.planning.validate import Round, Validated
from mindllm.planning.yaml_plan import KEYS, YamlPlan
from mindllm.terminal.tables import Column, Table, figures, texts
from mindllm.units import DEVICE_GB, MIB, device_memory, gigabytes, missing_memory

if TYPE_CHECKING:
    from mindllm.results import Part


def costs_parts(configured: Configured) -> Iterator[Part]:
    """Costs of every recompute kind, what is fixed, and how well the small runs are explained."""
    memory, times, problem = configured.memory, configured.times, configured.problem
    several = len(memory.layers) > 1
    columns = [
        *texts(*["layer"] * several, "recompute"),
        *figures("forward ms", "backward ms", "kept GB", "working GB"),
    ]
    table = Table(f"a layer and a micro-batch on {configured.device.name}", columns)
    layers = memory.layers.values()
    kept = gigabytes((size for layer in layers for size in layer.activation.values()), MIB)
    working = gigabytes((size for layer in layers for size in layer.transient.values()), MIB)
    for name, layer in memory.layers.items():
        spent = times.layers[name]
        for kind, again in spent.again.items():
            table.add_row(
                *[name] * several, kind, f"{spent.forward:.3f}", f"{spent.backward + again:.3f}",
                kept(layer.activation[kind]), working(layer.transient[kind]),
            )  # fmt: skip
    yield table
    ends = f"embedding {sum(times.head):.3f} ms, output layer and loss {sum(times.tail):.3f} ms"
    yield f"{ends}, between stages {times.point_to_point:.3f} ms, per step {problem.exposed_communication:.3f} ms"
    if times.uncounted:
        yield f"operations of these are not known, only their bytes are in the times: {', '.join(times.uncounted)}"
    beside = problem.per_stage("static_mb")
    static = " ".join(map(gigabytes(beside, MIB), beside))
    ahead = memory.runs.ahead
    parameters = [
        device_memory(layer.parameter, MIB) + f" ({name})" * several
        for name, layer in memory.layers.items()
        if name not in ahead
    ]
    yield f"parameters of a layer {', '.join(parameters)}; stages beside layers, GB: {static}"
    for name in ahead:
        yield f"{name}: memory beyond those of {ALL_RECOMPUTED}, which are beside the layers of the last stage"
    usable = device_memory(max(problem.per_stage("limit_mb")), MIB)
    gaps = f"{missing_memory(memory.runs.gaps_mb, MIB)} reserved for gaps between blocks: {usable}"
    yield f"memory by small runs, {DEVICE_GB}: limit {device_memory(configured.limit_mb, MIB)}, {gaps}"
    yield _residuals(configured)


def _residuals(configured: Configured) -> Table:
    runs = configured.memory.runs
    several = len(configured.memory.layers) > 1
    columns = [*texts("stage", *["layer"] * several, "recompute"), *figures("layers", "alive", "GB", "unexplained GB")]
    table = Table(f"{runs.count} small runs, simulated: memory, and what the fit leaves unexplained", columns)
    gb = gigabytes((row.memory_mb for row, _ in configured.memory.residuals), MIB)
    off = gigabytes((left for _, left in configured.memory.residuals), MIB)
    for row, left in configured.memory.residuals:
        cells = (row.kind, str(row.layers), str(row.alive), gb(row.memory_mb), off.signed(left))
        table.add_row(row.place, *[row.layer] * several, *cells)
    return table


def validated_parts(validated: Validated) -> Iterator[Part]:
    """Predicted and dry-run memory of every stage, round by round."""
    for number, found in enumerate(validated.rounds, start=1):
        verdict = "confirmed" if found.confirmed else "fits" if found.fits else "does not fit"
        yield (
            _round(
                f"round {number}: dry run of the plan, step {found.solution.best.reported_step:,.6g} ms: {verdict}",
                found,
            )
        )


def _round(title: str, found: Round) -> Table:
    names = (
        "stage",
        "layers",
        "recompute",
        "predicted GB",
        "dry run GB",
        "off",
        "with workspace GB",
        "limit GB",
        "how",
    )
    table = Table(title, [Column(name, is_text=name in ("recompute", "how")) for name in names])
    gb = gigabytes(found.needed_mb, MIB)
    rows = zip(found.memories, found.solution.best.peak_mb, found.used_mb, found.needed_mb, strict=True)
    for memory, predicted, used, needed in rows:
        table.add_row(
            str(memory.stage.number), str(memory.stage.layers), memory.stage.recompute, gb(predicted), gb(used),
            f"{100 * (predicted / used - 1):+.2f}%", gb(needed), gb(found.limit_mb), memory.method,
        )  # fmt: skip
    return table


def validated_answer(validated: Validated) -> dict[str, Any]:
    """For programs."""
    return {
        "rounds": len(validated.rounds),
        "confirmed": validated.chosen.confirmed,
        "dry_run_mb": [round(used, 1) for used in validated.chosen.used_mb],
        "dry_run_needed_mb": [round(needed, 1) for needed in validated.chosen.needed_mb],
        "dry_run_with_gaps_mb": [round(memory.actual_peak / MIB, 1) for memory in validated.chosen.memories],
    }


def simulated_parts(problem: Problem, fit: SimulatedFit) -> Iterator[Part]:
    """The costs of layers and ends, and how well they explain what was simulated."""
    parts: list[tuple[str, float, float, float, float, float]] = [
        (name, layer.forward, cost.backward, layer.parameter_mb, cost.activation_mb, cost.transient_mb)
        for layer in problem.layers
        for name, cost in ((f"{layer.name}, {kind}", cost) for kind, cost in layer.kinds.items())
    ]
    for name, end in (("first stage beside them", problem.head), ("last stage beside them", problem.tail)):
        working = problem.tail.transient_mb if end is problem.tail else 0.0
        parts.append((name, end.forward, end.backward, end.memory_mb, end.activation_mb, working))
    sizes = [gigabytes(column, MIB) for column in list(zip(*parts, strict=True))[3:]]
    rows = [
        (name, f"{forward:,.1f}", f"{backward:,.1f}", *(gb(size) for gb, size in zip(sizes, memory, strict=True)))
        for name, forward, backward, *memory in parts
    ]
    columns = figures("forward ms", "backward ms", "stays GB", "kept of a micro-batch GB", "working GB")
    yield Table("costs, shared out by least squares", [*texts("part"), *columns], rows)
    gb = gigabytes((peak.simulated for peak in fit.peaks), MIB)
    off = gigabytes((peak.simulated - peak.explained for peak in fit.peaks), MIB)
    said = [
        (
            peak.source,
            str(peak.stage),
            gb(peak.simulated),
            gb(peak.explained),
            off.signed(peak.simulated - peak.explained),
        )
        for peak in fit.peaks
    ]
    columns = [*texts("run"), *figures("stage", "simulated", "explained", "left")]
    yield Table("used peak of what was simulated, GB", columns, said)
    yield (
        f"margin on every stage: {missing_memory(fit.margin_mb, MIB)}, the most that is left; gaps between blocks: "
        f"{missing_memory(fit.gaps_mb, MIB)} less for a plan than the limit"
    )
    if fit.uncounted:
        yield f"only the bytes take time of {', '.join(fit.uncounted)}: their operations are not known"


def simulated_answer(fit: SimulatedFit) -> dict[str, Any]:
    """The fit for programs, MB."""
    return {
        "simulated": [vars(peak) for peak in fit.peaks],
        "margin_mb": fit.margin_mb,
        "gaps_mb": fit.gaps_mb,
        "uncounted": list(fit.uncounted),
    }


def mindformers_keys(best: Evaluation, written: YamlPlan) -> dict[str, Any]:
    """The plan as it stands in a YAML of MindFormers."""
    problem = best.problem
    chunks = {"pp_interleave_num": problem.chunks} if problem.chunks > 1 else {}
    return {
        "model": {"model_config": {"offset": written.offset, **chunks}},
        "parallel_config": {"pipeline_stage": problem.stages, "micro_batch_num": problem.micro_batches},
        "recompute_config": {key: getattr(written, key) for key in KEYS},
    }
