"""What a planner says: the answer for programs, tables for people, the plan layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mindllm.config.reading.yaml_tree import inline_yaml
from mindllm.planning.costs.formula import NAME, compared, gain
from mindllm.planning.costs.measured import Fit
from mindllm.planning.plan import Evaluation, comparable_steps
from mindllm.planning.solve import Solution
from mindllm.planning.validate import Round, Validated
from mindllm.planning.yaml_plan import KEYS, write_plan
from mindllm.terminal.tables import Column, Table, figures, texts
from mindllm.units import MIB, Gigabytes, device_memory, gigabytes, missing_memory

if TYPE_CHECKING:
    from mindllm.results import Part


def answer(solution: Solution) -> dict[str, Any]:
    """Return the answer as plain values; ``peak_memory_mb`` per stage, ``layers`` in model order.

    ``step_time`` is the reported step; ``lower_bound`` and ``gap`` are of ``objective``, which the planner minimizes.
    """
    best = solution.best
    written = write_plan(best.problem, best.plan)
    keys = ("offset", *KEYS)
    lists = {key: getattr(written, key) for key in keys} if written else dict.fromkeys(keys)
    if written and written.swap_config:
        lists["swap_config"] = written.swap_config
    return {
        **lists,
        "step_time": best.reported_step,
        "objective": best.step_time,
        "lower_bound": solution.lower_bound,
        "gap": solution.gap,
        "solve_seconds": round(solution.solve_seconds, 3),
        "even_split_step_time": solution.even.reported_step if solution.even else None,
        "peak_memory_mb": [round(float(peak), 3) for peak in best.peak_mb],
        "layers": layer_list(best),
    }


def layer_list(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Kind, stage, chunk and recomputation of every layer."""
    problem = evaluation.problem
    found: list[dict[str, Any]] = []
    for place in problem.visits:
        for name in evaluation.plan.places[place]:
            layer = problem.layers[problem.layer_order[len(found)]].name
            found.append({
                "layer": layer, "stage": place % problem.stages, "chunk": place // problem.stages, "recompute": name
            })  # fmt: skip
    return found


def solution_parts(solution: Solution, before: Evaluation | None = None) -> Iterator[Part]:
    """The plan beside ``before``, the YAML as it is, or else beside the even split; the bound, and the lists of the YAML."""
    best, even = solution.best, solution.even
    unit = " ms" if before or best.predicted else ""  # a problem in a file has its own unit
    if before:
        yield stage_table(f"before: {NAME}", before, unit)
    elif even:
        yield stage_table("before: even split", even, unit)
    yield stage_table("after: the plan", best, unit)
    if before:
        yield f"{_change(before, best, unit)}: {compared(best, before)}"
    if even is None:
        yield "The even split does not fit the memory."
    else:
        less = f"{100 * gain(best, even):.2f}% less time than the even split"
        yield f"{_change(even, best, unit)}: {less}"
    if not (before or even):
        yield f"step {best.reported_step:,.6g}{unit}"
    yield f"{bound_text(solution, unit)}, solved in {solution.solve_seconds:.2f} s"
    written = write_plan(best.problem, best.plan)
    if written is None:
        yield f"kinds {', '.join(best.problem.kind_names)} have no YAML form: see the layers of --json"
        return
    for key in ("offset", *KEYS):
        yield f"{key}: {inline_yaml(getattr(written, key))}"
    if written.swap_config:
        yield f"swap_config: {inline_yaml(written.swap_config)}"


def _change(before: Evaluation, best: Evaluation, unit: str) -> str:
    """Return both steps: ``step 18,223 -> 13,443.2 ms``."""
    then, now = comparable_steps(before, best)
    return f"step {then:,.6g} -> {now:,.6g}{unit}"


def bound_text(solution: Solution, unit: str = "") -> str:
    """Return the lower bound and the gap in words, for a run with the objective that they are of."""
    if solution.lower_bound is None or solution.gap is None:
        return "no lower bound was proved: gap unknown"
    objective = f"planner's objective {solution.best.step_time:,.6g}{unit}, " if solution.best.predicted else ""
    return f"{objective}lower bound of all plans {solution.lower_bound:,.6g}{unit}: gap {gap_text(solution)}"


def gap_text(solution: Solution) -> str:
    """The gap in per cent."""
    return "unknown" if solution.gap is None else f"{100 * solution.gap:.3g}%"


def stage_table(title: str, evaluation: Evaluation, unit: str = "") -> Table:
    """Layers, recomputation, time of a micro-batch in ``unit``, peak memory and bubble of every stage."""
    problem, spent = evaluation.problem, evaluation.passes
    passes = (f"forward{unit}", f"backward{unit}")
    headings = ("stage", "layers", "recompute", *passes, "memory GB", "limit GB", "bubble")
    columns = [Column(heading, is_text=heading == "recompute") for heading in headings]
    table = Table(f"{title}, step {evaluation.reported_step:,.6g}{unit}", columns)
    limits, gb = problem.per_stage("limit_mb"), gigabytes(evaluation.peak_mb, MIB)
    for stage in range(problem.stages):
        mine = range(stage, problem.places, problem.stages)
        names = [name for place in mine for name in evaluation.plan.places[place]]
        mix = ", ".join(f"{names.count(kind)} {kind}" for kind in problem.kind_names if kind in names)
        times = [float(part[list(mine)].sum()) for part in spent]
        table.add_row(
            str(stage),
            "+".join(str(evaluation.plan.counts[place]) for place in mine),
            mix,
            *(f"{value:,.5g}" for value in times),
            gb(evaluation.peak_mb[stage]),
            gb(limits[stage]) if np.isfinite(limits[stage]) else "none",
            f"{100 * evaluation.bubble[stage]:.1f}%",
        )
    return table


def manual_parts(plans: Mapping[str, Evaluation]) -> Iterator[Part]:
    """Plans that a person wrote, in a line each."""
    columns = [*texts("plan"), *figures("step", "largest memory GB"), *texts("fits"), *figures("bubble")]
    table = Table("manual plans", columns)
    gb = gigabytes((evaluation.peak_mb.max() for evaluation in plans.values()), MIB)
    for name, evaluation in plans.items():
        table.add_row(name, *manual_row(evaluation, gb))
    yield table


def manual_row(evaluation: Evaluation, gb: Gigabytes) -> tuple[str, ...]:
    """Step, largest memory in GB with its stage, whether it fits, and the mean bubble."""
    stage = int(evaluation.peak_mb.argmax())
    limits = np.array(evaluation.problem.per_stage("limit_mb"))
    over = np.flatnonzero(evaluation.peak_mb > limits + 1e-6)
    fits = "yes" if evaluation.fits else f"no: stages {', '.join(map(str, over))}"
    memory = f"{gb(evaluation.peak_mb[stage])} on stage {stage}"
    return f"{evaluation.reported_step:,.6g}", memory, fits, f"{100 * evaluation.bubble.mean():.1f}%"


def manual_answer(evaluation: Evaluation) -> dict[str, Any]:
    """A manual plan for programs."""
    return {
        "step_time": evaluation.reported_step,
        "peak_memory_mb": [round(float(peak), 3) for peak in evaluation.peak_mb],
        "fits": evaluation.fits,
    }


def fit_parts(fit: Fit) -> Iterator[Part]:
    """What measured memories were shared out to, and what is left."""
    parts = ", ".join(f"{name} {device_memory(value, MIB)}" for name, value in fit.values.items())
    yield f"memory fitted to what was measured: {parts}"
    for source, left in fit.residuals:
        yield f"measured minus fitted, GB, {source}: {' '.join(map(gigabytes(left, MIB).signed, left))}"
    yield f"margin on every stage: {missing_memory(fit.margin_mb, MIB)}, the most that a stage needs beyond the fit"


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
