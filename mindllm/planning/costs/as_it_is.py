"""The YAML as it is: its own offset, recomputation and number of chunks, judged at the costs that plans are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig, override_config
from mindllm.parallel.layer_plan import make_plan
from mindllm.planning.costs.formula import KINDS, plan_problem
from mindllm.planning.costs.offered_kinds import recomputed
from mindllm.planning.plan import Evaluation, Plan, evaluate
from mindllm.planning.problem import Problem
from mindllm.reduced_runs.even import even_keys
from mindllm.schedules.steady import NotSteady
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device

NAME = "the YAML as it is"


UNKNOWN = f"{NAME} cannot be judged: it recomputes in a way that plans do not offer, or reaches no steady state"


def judged(config: RunConfig, problem: Problem) -> Evaluation | None:
    """The plan that a run has, at the costs of its problem; None where that is not known (:data:`UNKNOWN`)."""
    plan = plan_of(config, problem)
    return _evaluated(problem, plan) if plan else None


def _evaluated(problem: Problem, plan: Plan) -> Evaluation | None:
    try:
        return evaluate(problem, plan)
    except NotSteady:
        return None


def plan_of(config: RunConfig, problem: Problem) -> Plan | None:
    """The plan that a run has, in the kinds of its problem; None where it recomputes in a way that is not offered."""
    kinds = {recomputed(LayerKind(), kind): name for name, kind in (problem.yaml_kinds or {}).items()}
    names = [kinds.get(kind, "") for kind in make_plan(config).kinds()]
    return _placed(config, names) if all(names) else None


def by_formula(config: RunConfig, device: Device, limit: float, name: str) -> Evaluation | None:
    """A run judged by the models of time and memory, whatever it recomputes; ``limit`` is in bytes. None: no steady state."""
    model, stages = config.model.config, config.parallel_config.pipeline_stage
    plan, kinds = make_plan(config), dict(KINDS)
    names = [_name(kind, kinds) for kind in plan.kinds()]
    bare = override_config(config, even_keys(config, stages, model.pp_interleave_num))
    used = {kind: own for kind, own in kinds.items() if kind in names}
    problem = plan_problem(workload_of(bare), device, limit, name, used)
    return _evaluated(problem, _placed(config, names))


def _name(kind: LayerKind, kinds: dict[str, LayerKind]) -> str:
    """The name of what a layer recomputes; a way that ``kinds`` do not have is added."""
    for name, known in kinds.items():
        if known == kind:
            return name
    others = len(kinds) - len(KINDS)
    name = f"as written {others + 1}" if others else "as written"
    kinds[name] = kind
    return name


def _placed(config: RunConfig, names: Sequence[str]) -> Plan:
    """The plan of a run whose layers recompute what their names say."""
    plan, places = make_plan(config), dict[tuple[int, int], list[str]]()
    for layer, name in zip(plan.layers, names, strict=True):
        places.setdefault((layer.chunk, layer.stage), []).append(name)
    return Plan(tuple(tuple(places[place]) for place in sorted(places)))


def gain(best: Evaluation, before: Evaluation) -> float:
    """Share of the time of ``before`` that ``best`` does without; below zero where it takes longer."""
    return 1 - best.step_time / before.step_time if before.step_time else 0.0


def shortage(before: Evaluation) -> str:
    """What a plan that does not fit lacks, in MB, and on which stage; empty where it fits."""
    over = before.peak_mb - np.array(before.problem.per_stage("limit_mb"))
    return "" if before.fits else f"{over.max():,.0f} MB over the limit on stage {over.argmax()}"


def compared(best: Evaluation, before: Evaluation) -> str:
    """The gain in words: ``0.52% less time than the YAML as it is``."""
    less = gain(best, before)
    told = f"{100 * abs(less):.2f}% {'less' if less >= 0 else 'more'} time than {NAME}"
    if not before.fits:
        return f"{told}, which does not fit: {shortage(before)}"
    return f"{told}: keep that" if less < 0 else told


def tree(best: Evaluation, before: Evaluation | None) -> dict[str, Any]:
    """For programs; null where the run recomputes in a way that cannot be judged."""
    return {
        "yaml_step_time": before.step_time if before else None,
        "yaml_peak_memory_mb": [round(float(peak), 3) for peak in before.peak_mb] if before else None,
        "yaml_fits": before.fits if before else None,
        "less_time_than_yaml": gain(best, before) if before else None,
    }
