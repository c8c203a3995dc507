"""What simulated runs were shared out to, for people and for programs, and the plan as the keys of a YAML of MindFormers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindllm.planning.from_programs.simulated_costs import SimulatedFit
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem
from mindllm.planning.yaml_plan import KEYS, YamlPlan
from mindllm.terminal.tables import Table, figures, texts

if TYPE_CHECKING:
    from mindllm.results import Part


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
