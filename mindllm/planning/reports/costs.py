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
from mindllm.units import MIB

if TYPE_CHECKING:
    from mindllm.results import Part


def costs_parts(configured: Configured) -> Iterator[Part]:
    """Costs of every recompute kind, what is fixed, and how well the small runs are explained."""
    memory, times, problem = configured.memory, configured.times, configured.problem
    several = len(memory.layers) > 1
    columns = [
        *texts(*["layer"] * several, "recompute"),
        *figures("forward ms", "backward ms", "kept MB", "working MB"),
    ]
    table = Table(f"a layer and a micro-batch on {configured.device.name}", columns)
    for name, layer in memory.layers.items():
        spent = times.layers[name]
        for kind, again in spent.again.items():
            table.add_row(
                *[name] * several, kind, f"{spent.forward:.3f}", f"{spent.backward + again:.3f}",
                f"{layer.activation[kind]:,.1f}", f"{layer.transient[kind]:,.1f}",
            )  # fmt: skip
    yield table
    ends = f"embedding {sum(times.head):.3f} ms, output layer and loss {sum(times.tail):.3f} ms"
    yield f"{ends}, between stages {times.point_to_point:.3f} ms, per step {problem.exposed_communication:.3f} ms"
    if times.uncounted:
        yield f"operations of these are not known, only their bytes are in the times: {', '.join(times.uncounted)}"
    static = " ".join(f"{value:,.0f}" for value in problem.per_stage("static_mb"))
    ahead = memory.runs.ahead
    parameters = [
        f"{layer.parameter:,.1f} MB" + f" ({name})" * several
        for name, layer in memory.layers.items()
        if name not in ahead
    ]
    yield f"parameters of a layer {', '.join(parameters)}; stages beside layers, MB: {static}"
    for name in ahead:
        yield f"{name}: MB beyond those of {ALL_RECOMPUTED}, which are beside the layers of the last stage"
    gaps = f"{memory.runs.gaps_mb:,.0f} MB are left for gaps between blocks"
    yield f"limit {configured.limit_mb:,.0f} MB (2**20 bytes), of which {gaps}"
    yield _residuals(configured)


def _residuals(configured: Configured) -> Table:
    runs = configured.memory.runs
    source = "estimated" if runs.estimated else "simulated"
    several = len(configured.memory.layers) > 1
    columns = [*texts("stage", *["layer"] * several, "recompute"), *figures("layers", "alive", "MB", "unexplained MB")]
    table = Table(f"{runs.count} small runs, {source}: memory, and what the fit leaves unexplained", columns)
    for row, left in configured.memory.residuals:
        cells = (row.kind, str(row.layers), str(row.alive), f"{row.memory_mb:,.1f}", f"{left:+.1f}")
        table.add_row(row.place, *[row.layer] * several, *cells)
    return table


def validated_parts(validated: Validated) -> Iterator[Part]:
    """Predicted and dry-run memory of every stage, round by round."""
    for number, found in enumerate(validated.rounds, start=1):
        verdict = "confirmed" if found.confirmed else "fits" if found.fits else "does not fit"
        yield (
            _round(f"round {number}: dry run of the plan, step {found.solution.best.step_time:,.6g}: {verdict}", found)
        )


def _round(title: str, found: Round) -> Table:
    names = ("stage", "layers", "recompute", "predicted MB", "dry run MB", "off", "with gaps MB", "limit MB", "how")
    table = Table(title, [Column(name, is_text=name in ("recompute", "how")) for name in names])
    for memory, predicted, used in zip(found.memories, found.solution.best.peak_mb, found.used_mb, strict=True):
        table.add_row(
            str(memory.stage.number), str(memory.stage.layers), memory.stage.recompute, f"{predicted:,.0f}", f"{used:,.0f}",
            f"{100 * (predicted / used - 1):+.2f}%", f"{memory.actual_peak / MIB:,.0f}", f"{found.limit_mb:,.0f}",
            memory.method,
        )  # fmt: skip
    return table


def validated_answer(validated: Validated) -> dict[str, Any]:
    """For programs."""
    return {
        "rounds": len(validated.rounds),
        "confirmed": validated.chosen.confirmed,
        "dry_run_mb": [round(used, 1) for used in validated.chosen.used_mb],
        "dry_run_with_gaps_mb": [round(memory.actual_peak / MIB, 1) for memory in validated.chosen.memories],
    }


def simulated_parts(problem: Problem, fit: SimulatedFit) -> Iterator[Part]:
    """The costs of layers and ends, and how well they explain what was simulated."""
    rows = [
        (name, *_figures(layer.forward, cost.backward, layer.parameter_mb, cost.activation_mb, cost.transient_mb))
        for layer in problem.layers
        for name, cost in ((f"{layer.name}, {kind}", cost) for kind, cost in layer.kinds.items())
    ]
    for name, end in (("first stage beside them", problem.head), ("last stage beside them", problem.tail)):
        working = problem.tail.transient_mb if end is problem.tail else 0.0
        rows.append((name, *_figures(end.forward, end.backward, end.memory_mb, end.activation_mb, working)))
    columns = figures("forward ms", "backward ms", "stays MB", "kept of a micro-batch MB", "working MB")
    yield Table("costs, shared out by least squares", [*texts("part"), *columns], rows)
    said = [
        (peak.source, str(peak.stage), *_figures(peak.simulated, peak.explained, peak.simulated - peak.explained))
        for peak in fit.peaks
    ]
    columns = [*texts("run"), *figures("stage", "simulated", "explained", "left")]
    yield Table("used peak of what was simulated, MB", columns, said)
    yield (
        f"margin on every stage: {fit.margin_mb:,.0f} MB, the most that is left; gaps between blocks: {fit.gaps_mb:,.0f} MB "
        "less for a plan than the limit"
    )
    if fit.uncounted:
        yield f"only the bytes take time of {', '.join(fit.uncounted)}: their operations are not known"


def _figures(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:,.1f}" for value in values)


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
