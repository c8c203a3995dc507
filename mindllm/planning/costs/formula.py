"""The planner's problem of a run from the architecture alone: layers, ends and memory by the models of time and of memory.

Nothing is compiled or simulated. The YAML as it is (its own offset, recomputation and number of chunks) is judged at the costs
that plans are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.layer_kind import FULL, NONE, SELECT, LayerKind
from mindllm.config import RunConfig, override_config
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, LayerAssignment, make_plan
from mindllm.planning.costs.on_the_host import Way, check_swapped, copies_waited_for, hosted
from mindllm.planning.plan import Evaluation, Plan, comparable_steps, evaluate
from mindllm.planning.problem import STANDARD_KINDS, Problem, make_problem
from mindllm.reduced_runs.even import even_keys
from mindllm.schedules.orders import alive, stage_orders
from mindllm.schedules.steady import NotSteady
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.swapped import moved_bytes
from mindllm.timing.device import Device
from mindllm.timing.memory import (
    cast_for_a_piece,
    kept_at_the_loss,
    kept_of_embedding,
    layer_needs,
    left_of_ends,
    left_of_layer,
    loss_bytes,
    mask_bytes,
    seen_by_a_piece,
    state_bytes,
    update_working_bytes,
)
from mindllm.timing.non_layer_cost import Held, embedding_parameters, last_parameters, layer_parameters
from mindllm.timing.step import TimedWork
from mindllm.timing.step_work import Part, spec_part, step_work
from mindllm.timing.verdict import memory_limit, usable_memory
from mindllm.timing.weight_memory import copied_at_norm, more_at_update, squares_at_norm
from mindllm.timing.workload import Workload
from mindllm.units import MIB, MILLISECONDS, missing_memory

KINDS = {
    NONE: LayerKind(),
    SELECT: LayerKind(patterns=(("select_recompute", tuple(sorted(DEFAULT_PATTERNS["select_recompute"]))),)),
    FULL: LayerKind(recompute=True),
}
NAME = "the YAML as it is"

UNKNOWN = f"{NAME} cannot be judged: it recomputes in a way that plans do not offer, or reaches no steady state"


def plan_problem(
    workload: Workload,
    device: Device,
    limit: float,
    name: str,
    kinds: Mapping[str, LayerKind] = KINDS,
    swap: bool = False,
) -> Problem:
    """Where to put layers and what to recompute; times are milliseconds, ``limit`` is bytes of a device.

    ``kinds``: ways to recompute a layer, by name; others than the standard ones have no form in a YAML. With ``swap`` each but
    full recomputation comes also with attention's results on the host.

    Raises:
        UserError: there are fewer layers than places, or more micro-batches than are simulated.
    """
    work = step_work(workload)
    timed = TimedWork(work, device)
    plan, sizes = workload.plan, workload.strategy
    most = _most_pieces(workload) if sizes.pieces > 1 else 1
    ways = {name: Way(kind) for name, kind in kinds.items()} | (hosted(workload, timed, kinds) if swap else {})
    names = ("forward", "backward", "weight_gradient")
    ends = {end: dict(zip(names, _end_times(work.parts[end], timed), strict=True)) for end in ("embedding", "head")}
    left = [left_of_ends(workload, stage) for stage in range(plan.stages)]
    fields: dict[str, Any] = {
        "name": name,
        "stages": plan.stages,
        "chunks": plan.chunks,
        "micro_batches": sizes.micro_batches,
        "pieces": sizes.pieces,
        "schedule": sizes.schedule,
        "layers": [
            _layer(number, spec, count, workload, timed, ways, most)
            for number, (spec, count) in enumerate(_runs(workload))
        ],
        "head": {
            **ends["embedding"],
            "memory_mb": _state(embedding_parameters(workload), workload) + left[0] / MIB,
            "activation_mb": kept_of_embedding(workload) / MIB,
        },
        "tail": {
            **ends["head"],
            "memory_mb": _state(last_parameters(workload), workload) + left[plan.last_stage] / MIB,
            "activation_mb": kept_at_the_loss(workload) / MIB,
            "transient_mb": loss_bytes(workload) / MIB,
        },
        "static_mb": tuple(size / MIB for size in mask_bytes(workload)),
        "start_mb": _at_start(workload),
        "update_mb": _in_update(workload),
        "limit_mb": limit / MIB,
        "recompute_kinds": _written(kinds, ways),
        "point_to_point": MILLISECONDS * timed.delay,
        "exposed_communication": MILLISECONDS * _once(timed, device) / sizes.accumulation,
    }
    return make_problem(fields, name)


def _once(timed: TimedWork, device: Device) -> float:
    """Return the seconds that a step takes once, of layers spread evenly: exchanges, update and what a step costs beside."""
    return max(end.seconds for end in timed.ends) + device.step_overhead.value


def _at_start(workload: Workload) -> tuple[float, ...]:
    """What a stage needs in the update beside its layers, ``[stages]``: of embedding and head, and for a moment.

    Where the norm reads copies of accumulators, they are gone when weights are updated: that is :func:`_in_update`.
    """
    working = 0.0 if _copies(workload) else update_working_bytes(workload)
    working = max(working, squares_at_norm(workload))
    return tuple(
        (working + sum(_at_update(held, workload) for held in ends) - left_of_ends(workload, stage)) / MIB
        for stage, ends in enumerate(_ends(workload))
    )


def _in_update(workload: Workload) -> tuple[float, ...]:
    """What a stage needs beside its layers when such copies are gone, ``[stages]``; of layers there is nothing more then."""
    if not _copies(workload):
        return (0.0,) * workload.plan.stages
    working = update_working_bytes(workload)
    return tuple((working + sum(more_at_update(held, workload) for held in ends)) / MIB for ends in _ends(workload))


def _copies(workload: Workload) -> bool:
    """Whether the norm reads copies of accumulators."""
    return copied_at_norm(Held(trained=1.0), workload) > 0.0


def _ends(workload: Workload) -> list[list[Held]]:
    """What every stage holds beside its layers, ``[stages]``: the embedding, the head, both or neither."""
    ends: list[list[Held]] = [[] for _ in range(workload.plan.stages)]
    ends[0].append(embedding_parameters(workload))
    ends[workload.plan.last_stage].append(last_parameters(workload))
    return ends


def _at_update(held: Held, workload: Workload) -> float:
    """Bytes of these weights' gradients in the update beyond their state, and of copies for the norm."""
    return more_at_update(held, workload) + copied_at_norm(held, workload)


def _most_pieces(workload: Workload) -> int:
    """Pieces that the fullest place keeps at once."""
    plan, sizes = workload.plan, workload.strategy
    orders = stage_orders(sizes.schedule, plan.stages, plan.chunks, sizes.micro_batches, sizes.pieces)
    return max(int(vectors.max()) for vectors in alive(orders, plan.chunks))


def _written(kinds: Mapping[str, LayerKind], ways: Mapping[str, Way]) -> dict[str, Any] | None:
    """How kinds stand in a YAML; None where that is not known of all of them."""
    if not all(KINDS.get(name) == kind for name, kind in kinds.items()):
        return None
    of_kind = {kind: STANDARD_KINDS[name].model_dump() for name, kind in kinds.items()}
    return {name: {**of_kind[way.kind], "swap": way.swap} for name, way in ways.items()}


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


def _end_times(part: Part, timed: TimedWork) -> tuple[float, float, float]:
    """Milliseconds of the passes through an end, and of its gradients of weights."""
    forward, backward = timed.passes(part)
    return (
        MILLISECONDS * forward.seconds, MILLISECONDS * backward.seconds,
        MILLISECONDS * min(timed.weight_gradients(part), backward.seconds),
    )  # fmt: skip


def _layer(
    number: int,
    spec: LayerSpec,
    count: int,
    workload: Workload,
    timed: TimedWork,
    ways: Mapping[str, Way],
    most: int,
) -> dict[str, Any]:
    """Costs of a layer, of whose pieces the fullest place keeps the ``most`` at once.

    All but one of them keep matrices of their own in half precision (``timing/memory.py``). Shared out over the most, memory is
    that of the formula in the fullest place, and more in others. Gradients that passes leave are taken as there, but those of the
    layer in its backward pass: what is needed in the first layer, and more behind it.
    """
    whole = spec_part(workload, spec, LayerAssignment(0))
    forward, quickest = (one.seconds for one in timed.passes(whole))
    held = layer_parameters(spec, workload.strategy, workload.architecture.pet, workload.update)
    costs, left = {}, left_of_layer(workload, spec)
    for name, way in ways.items():
        own = LayerAssignment.of_kind(way.kind, 0)
        part = spec_part(workload, spec, own, way.moves)
        backward = timed.passes(part)[1].seconds + copies_waited_for(timed, part)
        kept, working = layer_needs(workload, spec, own)
        kept, working = kept - moved_bytes(part.moved), working + moved_bytes(part.moved)
        kept -= 0.0 if own.recompute else cast_for_a_piece(workload, spec) / most
        kept, working = max(0.0, kept), working + min(0.0, kept)  # of a step's only pass gradients are taken as there
        costs[name] = {
            "backward": MILLISECONDS * backward,
            "activation_mb": kept / MIB,
            "transient_mb": max(0.0, working - left) / MIB,
            "again": MILLISECONDS * min(timed.again_seconds(part), backward),
        }
    return {
        "name": f"layers {number}",
        "count": count,
        "forward": MILLISECONDS * forward,
        "weight_gradient": MILLISECONDS * min(timed.weight_gradients(whole), quickest),
        "parameter_mb": _state(held, workload) + (left + 2 * seen_by_a_piece(workload, spec)) / MIB,
        "start_mb": (_at_update(held, workload) - left) / MIB,
        "kinds": costs,
    }


def check_planned(config: RunConfig, swap: bool = False) -> None:
    """Raise UserError, naming the key, if the run has no pipeline, moves results to the host or predicts several tokens ahead.

    With ``swap`` plans choose which results move to the host.
    """
    stages = config.parallel_config.pipeline_stage
    if stages < 2:
        message = f"is {stages}: there is no pipeline to plan; write a number of stages from 2 on"
        raise config.error("parallel_config.pipeline_stage", message)
    if config.swap_config.swap and not swap:
        message = "a plan chooses recomputation, not what waits on the host (value true); write false, or --swap"
        raise config.error("swap_config.swap", message)
    ahead = config.model.config.num_nextn_predict_layers
    if ahead > 1:
        message = f"all of them must be on the last stage, and plans place one there (value {ahead}); write 1 or 0"
        raise config.error("model.model_config.num_nextn_predict_layers", message)


def formula_problems(
    config: RunConfig, device: Device, numbers: Sequence[int] | None, swap: bool = False
) -> list[Problem]:
    """The problem of ``config`` for each number of chunks per stage (None: the YAML's own).

    Raises:
        UserError: the run has no pipeline, several layers predict ahead, there are fewer layers than places, or with ``swap``
            it has several chunks or an order other than 1F1B, or the device no link to its host.
    """
    check_planned(config, swap)
    if swap:
        check_swapped(config, numbers)
    layers, stages = config.model.config.layer_count, config.parallel_config.pipeline_stage
    if layers < stages * max(numbers or [1]):
        message = f"{layers} layers cannot fill {stages} stages x {max(numbers or [1])} chunks: each needs one"
        raise config.error("model.model_config.pp_interleave_num", message)
    limit = memory_limit(config, device)
    name = config.trainer.model_name or "run"
    return [
        formula_problem(_bare(config, chunks), device, limit, name, swap=swap)
        for chunks in dict.fromkeys(numbers or [config.model.config.pp_interleave_num])
    ]


def _bare(config: RunConfig, chunks: int) -> RunConfig:
    """The run with its layers spread evenly over so many chunks per stage and nothing recomputed, in the schedule it has."""
    pipeline = config.parallel.pipeline_config
    schedule = {"parallel.pipeline_config.pipeline_scheduler": pipeline.pipeline_scheduler}
    staying = {"swap_config.swap": False, "swap_config.layer_swap": None, "swap_config.op_swap": None}
    plain = {**even_keys(config, config.parallel_config.pipeline_stage, chunks), **staying}
    return override_config(config, {**plain, **schedule})


def evaluate_run(config: RunConfig, device: Device) -> Evaluation | None:
    """The run of the YAML as it is, with the same costs and the same limit; None also where results wait on the host."""
    if config.swap_config.swap:
        return None
    limit = usable_memory(memory_limit(config, device))
    return by_formula(config, device, limit, config.trainer.model_name or "run")


def formula_problem(
    bare: RunConfig,
    device: Device,
    limit: float,
    name: str,
    kinds: Mapping[str, LayerKind] = KINDS,
    swap: bool = False,
) -> Problem:
    """The problem of a run that recomputes nothing; ``limit`` is bytes of a device, some of which stay free."""
    return plan_problem(workload_of(bare), device, usable_memory(limit), name, kinds, swap)


def by_formula(config: RunConfig, device: Device, limit: float, name: str) -> Evaluation | None:
    """Evaluate a run by the models of time and memory, whatever it recomputes; None if it reaches no steady state.

    ``limit`` is in bytes.
    """
    kinds = dict(KINDS)
    plan = run_plan(config, kinds)
    bare = _bare(config, config.model.config.pp_interleave_num)
    names = {name for place in plan.places for name in place} | {NONE}  # a V computes all of it again
    problem = plan_problem(workload_of(bare), device, limit, name, {n: kinds[n] for n in kinds if n in names})
    try:
        return evaluate(problem, plan)
    except NotSteady:
        return None


def run_plan(config: RunConfig, kinds: dict[str, LayerKind]) -> Plan:
    """Return the plan of a run as it is; recomputation that ``kinds`` lack is added to them as ``as written``."""
    layers, places = make_plan(config), dict[tuple[int, int], list[str]]()
    for layer, kind in zip(layers.layers, layers.kinds(), strict=True):
        name = next((name for name, known in kinds.items() if known == kind), None)
        if name is None:
            added = len(kinds) - len(KINDS)
            name = f"as written {added + 1}" if added else "as written"
            kinds[name] = kind
        places.setdefault((layer.chunk, layer.stage), []).append(name)
    return Plan(tuple(tuple(places[place]) for place in sorted(places)))


def gain(best: Evaluation, before: Evaluation) -> float:
    """Return the share of the step of ``before`` that ``best`` saves; negative where it takes longer."""
    now, then = comparable_steps(best, before)
    return 1 - now / then if then else 0.0


def shortage(before: Evaluation) -> str:
    """What a plan that does not fit lacks, in GB, and on which stage; empty where it fits."""
    over = before.peak_mb - np.array(before.problem.per_stage("limit_mb"))
    return "" if before.fits else f"{missing_memory(over.max(), MIB)} over the limit on stage {over.argmax()}"


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
        "yaml_step_time": before.reported_step if before else None,
        "yaml_peak_memory_mb": [round(float(peak), 3) for peak in before.peak_mb] if before else None,
        "yaml_fits": before.fits if before else None,
        "less_time_than_yaml": gain(best, before) if before else None,
    }
