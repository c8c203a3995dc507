"""The planner's problem of a run from the architecture alone: layers, ends and memory by the models of time and of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.layer_kind import FULL, NONE, SELECT, LayerKind
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, LayerAssignment
from mindllm.planning.problem import STANDARD_KINDS, Problem, make_problem
from mindllm.timing.device import Device
from mindllm.timing.memory import layer_needs, loss_bytes, state_bytes
from mindllm.timing.non_layer_cost import Held, embedding_parameters, last_parameters, layer_parameters
from mindllm.timing.step import TimedWork
from mindllm.timing.step_work import spec_part, step_work
from mindllm.timing.workload import Workload
from mindllm.units import MIB, MILLISECONDS

KINDS = {
    NONE: LayerKind(),
    SELECT: LayerKind(patterns=(("select_recompute", tuple(sorted(DEFAULT_PATTERNS["select_recompute"]))),)),
    FULL: LayerKind(recompute=True),
}


def plan_problem(
    workload: Workload, device: Device, limit: float, name: str, kinds: Mapping[str, LayerKind] = KINDS
) -> Problem:
    """Where to put layers and what to recompute; times are milliseconds, ``limit`` is bytes of a device.

    ``kinds``: ways to recompute a layer, by name; others than the standard ones have no form in a YAML.

    Raises:
        UserError: there are fewer layers than places, or more micro-batches than are simulated.
    """
    work = step_work(workload)
    timed = TimedWork(work, device)
    plan, sizes = workload.plan, workload.strategy
    ends = {}
    for end in ("embedding", "head"):
        ends[end] = [MILLISECONDS * one.seconds for one in timed.passes(work.parts[end])]
    fields: dict[str, Any] = {
        "name": name,
        "stages": plan.stages,
        "chunks": plan.chunks,
        "micro_batches": sizes.micro_batches,
        "layers": [
            _layer(number, spec, count, workload, timed, kinds) for number, (spec, count) in enumerate(_runs(workload))
        ],
        "head": {
            "forward": ends["embedding"][0],
            "backward": ends["embedding"][1],
            "memory_mb": _state(embedding_parameters(workload), workload),
        },
        "tail": {
            "forward": ends["head"][0],
            "backward": ends["head"][1],
            "memory_mb": _state(last_parameters(workload), workload),
            "transient_mb": loss_bytes(workload) / MIB,
        },
        "limit_mb": limit / MIB,
        "recompute_kinds": _written(kinds),
        "point_to_point": MILLISECONDS * timed.delay,
        "exposed_communication": MILLISECONDS * max(end.seconds for end in timed.ends),
    }
    return make_problem(fields, name)


def _written(kinds: Mapping[str, LayerKind]) -> dict[str, Any] | None:
    """How kinds stand in a YAML; None where that is not known of all of them."""
    if not all(KINDS.get(name) == kind for name, kind in kinds.items()):
        return None
    return {name: STANDARD_KINDS[name].model_dump() for name in kinds}


def _runs(workload: Workload) -> list[tuple[LayerSpec, int]]:
    """Equal layers that follow each other."""
    found: list[tuple[LayerSpec, int]] = []
    for spec in workload.architecture.layers:
        if found and found[-1][0] == spec:
            found[-1] = (spec, found[-1][1] + 1)
        else:
            found.append((spec, 1))
    return found


def _state(held: Held, workload: Workload) -> float:
    return state_bytes(held, workload) / MIB


def _layer(
    number: int, spec: LayerSpec, count: int, workload: Workload, timed: TimedWork, kinds: Mapping[str, LayerKind]
) -> dict[str, Any]:
    forward = timed.passes(spec_part(workload, spec, LayerAssignment(0)))[0].seconds
    costs = {}
    for name, kind in kinds.items():
        own = LayerAssignment.of_kind(kind, 0)
        backward = timed.passes(spec_part(workload, spec, own))[1].seconds
        kept, working = layer_needs(workload, spec, own)
        costs[name] = {
            "backward": MILLISECONDS * backward,
            "activation_mb": kept / MIB,
            "transient_mb": working / MIB,
        }
    return {
        "name": f"layers {number}",
        "count": count,
        "forward": MILLISECONDS * forward,
        "parameter_mb": _state(layer_parameters(spec, workload.strategy, workload.architecture.pet), workload),
        "kinds": costs,
    }
