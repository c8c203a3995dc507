"""Answers of the planner: plain values for programs, tables for people, the plan layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mindllm.config.reading.yaml_tree import inline_yaml
from mindllm.planning.costs.measured import Fit
from mindllm.planning.plan import Evaluation, comparable_steps
from mindllm.planning.solve import Solution
from mindllm.planning.validate import Round, Validated
from mindllm.planning.yaml_plan import KEYS, write_plan
from mindllm.terminal.tables import Column, Table, figures, texts
from mindllm.units import MIB, Gigabytes, device_memory, gigabytes, missing_memory

if TYPE_CHECKING:
    from mindllm.results import Part

RUN_AS_IT_IS = "the YAML as it is"
NOT_EVALUATED = f"{RUN_AS_IT_IS} cannot be evaluated: it moves results to the host, or reaches no steady state"


def answer(solution: Solution) -> dict[str, Any]:
    """Return the answer as plain values: ``peak_memory_mb`` per stage, ``layers`` in model order.

    ``step_time`` is the reported step; ``lower_bound`` and ``gap`` refer to ``objective``, which the planner minimizes.
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
    """Return the kind, stage, chunk and recomputation of every layer."""
    problem = evaluation.problem
    layers: list[dict[str, Any]] = []
    for place in problem.visits:
        for name in evaluation.plan.places[place]:
            layer = problem.layers[problem.layer_order[len(layers)]].name
            layers.append({
                "layer": layer, "stage": place % problem.stages, "chunk": place // problem.stages, "recompute": name
            })  # fmt: skip
    return layers


def solution_parts(solution: Solution, before: Evaluation | None = None) -> Iterator[Part]:
    """Yield the plan next to ``before`` (the YAML as it is) or to the even split, the bound, and the lists of the YAML."""
    best, even = solution.best, solution.even
    unit = " ms" if before or best.predicted else ""  # a problem in a file has its own unit
    if before:
        yield stage_table(f"before: {RUN_AS_IT_IS}", before, unit)
    elif even:
        yield stage_table("before: even split", even, unit)
    yield stage_table("after: the plan", best, unit)
    if before:
        yield f"{_change(before, best, unit)}: {describe_gain(best, before)}"
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
    """Return the lower bound and the gap in words; for a run also the objective that they refer to."""
    if solution.lower_bound is None or solution.gap is None:
        return "no lower bound was proved: gap unknown"
    objective = f"planner's objective {solution.best.step_time:,.6g}{unit}, " if solution.best.predicted else ""
    return f"{objective}lower bound of all plans {solution.lower_bound:,.6g}{unit}: gap {gap_text(solution)}"


def gap_text(solution: Solution) -> str:
    """Return the gap in percent."""
    return "unknown" if solution.gap is None else f"{100 * solution.gap:.3g}%"


def stage_table(title: str, evaluation: Evaluation, unit: str = "") -> Table:
    """Return layers, recomputation, time of a micro-batch in ``unit``, peak memory and bubble of every stage."""
    problem, spent = evaluation.problem, evaluation.passes
    passes = (f"forward{unit}", f"backward{unit}")
    headings = ("stage", "layers", "recompute", *passes, "memory GB", "limit GB", "bubble")
    columns = [Column(heading, is_text=heading == "recompute") for heading in headings]
    table = Table(f"{title}, step {evaluation.reported_step:,.6g}{unit}", columns)
    limits, gb = problem.per_stage("limit_mb"), gigabytes(evaluation.peak_mb, MIB)
    for stage in range(problem.stages):
        places = range(stage, problem.places, problem.stages)
        names = [name for place in places for name in evaluation.plan.places[place]]
        mix = ", ".join(f"{names.count(kind)} {kind}" for kind in problem.kind_names if kind in names)
        times = [float(part[list(places)].sum()) for part in spent]
        table.add_row(
            str(stage),
            "+".join(str(evaluation.plan.counts[place]) for place in places),
            mix,
            *(f"{value:,.5g}" for value in times),
            gb(evaluation.peak_mb[stage]),
            gb(limits[stage]) if np.isfinite(limits[stage]) else "none",
            f"{100 * evaluation.bubble[stage]:.1f}%",
        )
    return table


def manual_parts(plans: Mapping[str, Evaluation]) -> Iterator[Part]:
    """Yield a table of manual plans, one per line."""
    columns = [*texts("plan"), *figures("step", "largest memory GB"), *texts("fits"), *figures("bubble")]
    table = Table("manual plans", columns)
    gb = gigabytes((evaluation.peak_mb.max() for evaluation in plans.values()), MIB)
    for name, evaluation in plans.items():
        table.add_row(name, *manual_row(evaluation, gb))
    yield table


def manual_row(evaluation: Evaluation, gb: Gigabytes) -> tuple[str, ...]:
    """Return the step, the largest memory in GB with its stage, whether the plan fits, and the mean bubble."""
    stage = int(evaluation.peak_mb.argmax())
    limits = np.array(evaluation.problem.per_stage("limit_mb"))
    over = np.flatnonzero(evaluation.peak_mb > limits + 1e-6)
    fits = "yes" if evaluation.fits else f"no: stages {', '.join(map(str, over))}"
    memory = f"{gb(evaluation.peak_mb[stage])} on stage {stage}"
    return f"{evaluation.reported_step:,.6g}", memory, fits, f"{100 * evaluation.bubble.mean():.1f}%"


def manual_answer(evaluation: Evaluation) -> dict[str, Any]:
    """Return a manual plan as plain values."""
    return {
        "step_time": evaluation.reported_step,
        "peak_memory_mb": [round(float(peak), 3) for peak in evaluation.peak_mb],
        "fits": evaluation.fits,
    }


def fit_parts(fit: Fit) -> Iterator[Part]:
    """Yield the fitted memory of layers and ends, and the residuals of the fit."""
    parts = ", ".join(f"{name} {device_memory(value, MIB)}" for name, value in fit.values.items())
    yield f"memory fitted to what was measured: {parts}"
    for source, residuals in fit.residuals:
        yield f"measured minus fitted, GB, {source}: {' '.join(map(gigabytes(residuals, MIB).signed, residuals))}"
    yield f"margin on every stage: {missing_memory(fit.margin_mb, MIB)}, the most that a stage needs beyond the fit"


def validated_parts(validated: Validated) -> Iterator[Part]:
    """Yield predicted and dry-run memory of every stage, round by round."""
    for number, result in enumerate(validated.rounds, start=1):
        verdict = "confirmed" if result.confirmed else "fits" if result.fits else "does not fit"
        step = f"{result.solution.best.reported_step:,.6g} ms"
        yield _round_table(f"round {number}: dry run of the plan, step {step}: {verdict}", result)


def _round_table(title: str, result: Round) -> Table:
    """Return predicted and dry-run memory of every stage in one round."""
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
    gb = gigabytes(result.needed_mb, MIB)
    rows = zip(result.memories, result.solution.best.peak_mb, result.used_mb, result.needed_mb, strict=True)
    for memory, predicted, used, needed in rows:
        table.add_row(
            str(memory.stage.number), str(memory.stage.layers), memory.stage.recompute, gb(predicted), gb(used),
            f"{100 * (predicted / used - 1):+.2f}%", gb(needed), gb(result.limit_mb), memory.method,
        )  # fmt: skip
    return table


def validated_answer(validated: Validated) -> dict[str, Any]:
    """Return the validation as plain values."""
    return {
        "rounds": len(validated.rounds),
        "confirmed": validated.chosen.confirmed,
        "dry_run_mb": [round(used, 1) for used in validated.chosen.used_mb],
        "dry_run_needed_mb": [round(needed, 1) for needed in validated.chosen.needed_mb],
        "dry_run_with_gaps_mb": [round(memory.actual_peak / MIB, 1) for memory in validated.chosen.memories],
    }


def gain(best: Evaluation, before: Evaluation) -> float:
    """Return the share of the step of ``before`` that ``best`` saves; negative if it takes longer."""
    step, step_before = comparable_steps(best, before)
    return 1 - step / step_before if step_before else 0.0


def describe_gain(best: Evaluation, before: Evaluation) -> str:
    """Return the gain in words: ``0.52% less time than the YAML as it is``."""
    saved = gain(best, before)
    text = f"{100 * abs(saved):.2f}% {'less' if saved >= 0 else 'more'} time than {RUN_AS_IT_IS}"
    if before.fits:
        return f"{text}: keep that" if saved < 0 else text
    over = before.peak_mb - np.array(before.problem.per_stage("limit_mb"))
    return f"{text}, which does not fit: {missing_memory(over.max(), MIB)} over the limit on stage {over.argmax()}"


def comparison_answer(best: Evaluation, before: Evaluation | None) -> dict[str, Any]:
    """Return the plan next to the YAML as it is as plain values; null if that cannot be evaluated."""
    return {
        "yaml_step_time": before.reported_step if before else None,
        "yaml_peak_memory_mb": [round(float(peak), 3) for peak in before.peak_mb] if before else None,
        "yaml_fits": before.fits if before else None,
        "less_time_than_yaml": gain(best, before) if before else None,
    }
