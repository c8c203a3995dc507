"""The planning problem of a run, from its architecture: layers, ends and memory by the models of time and of memory.

Nothing is compiled or simulated. The run as it is (with its own offset, recomputation and number of chunks) is evaluated with the
same costs as plans.

Plans may also move the results of fused attention to the host (``swap_config``). Copies run on their own stream. A layer waits
if a copy takes longer than its own pass, or if a result is not back when the backward pass needs it
(``timing/costs/swapped.py``). A place may also hide copies behind its other layers, so these costs are upper bounds of those of
the model of time. A result is prefetched as many operators ahead as its copy takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.layer_counts import ONE_F_ONE_B
from mindllm.architecture.layer_kind import FULL, NONE, SELECT, LayerKind
from mindllm.config import RunConfig, override_config
from mindllm.config.recompute import ATTENTION
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, LayerAssignment, make_plan
from mindllm.planning.plan import Evaluation, Plan, evaluate
from mindllm.planning.problem import STANDARD_KINDS, Problem, make_problem
from mindllm.reduced_runs.even import even_keys
from mindllm.schedules.orders import alive, stage_orders
from mindllm.schedules.steady import NotSteady
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.swapped import late_seconds, moved_bytes
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
from mindllm.timing.workload import Swap, Workload
from mindllm.units import MIB, MILLISECONDS

KINDS = {
    NONE: LayerKind(),
    SELECT: LayerKind(patterns=(("select_recompute", tuple(sorted(DEFAULT_PATTERNS["select_recompute"]))),)),
    FULL: LayerKind(recompute=True),
}
SWAP_PRICE = 1e-5  # of a backward pass, so that nothing is moved without a gain


@dataclass(frozen=True)
class Treatment:
    """Treatment of a layer's activations: its recomputation, and the ``backward_prefetch`` of attention's results on the host.

    With ``swap`` 0 they stay on the device.
    """

    kind: LayerKind
    swap: int = 0

    @property
    def moves(self) -> Swap:
        """Results that wait on the host."""
        return ((ATTENTION, self.swap),) if self.swap else ()


def formula_problems(
    config: RunConfig, device: Device, numbers: Sequence[int] | None, swap: bool = False
) -> list[Problem]:
    """Return the problem of ``config`` for each number of chunks per stage (None: the number in the YAML).

    Raises:
        UserError: the run has no pipeline, several layers predict ahead, or there are fewer layers than places. With
            ``swap``: the run has several chunks or an order other than 1F1B, or the device has no link to its host.
    """
    check_planned(config, swap)
    numbers = list(dict.fromkeys(numbers or [config.model.config.pp_interleave_num]))
    if swap:
        _check_swapped(config, max(numbers))
    layers, stages = config.model.config.layer_count, config.parallel_config.pipeline_stage
    if layers < stages * max(numbers):
        message = f"{layers} layers cannot fill {stages} stages x {max(numbers)} chunks: each needs one"
        raise config.error("model.model_config.pp_interleave_num", message)
    limit = memory_limit(config, device)
    name = config.trainer.model_name or "run"
    return [formula_problem(_even_run(config, chunks), device, limit, name, swap=swap) for chunks in numbers]


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
    mtp_layers = config.model.config.num_nextn_predict_layers
    if mtp_layers > 1:
        message = f"all of them must be on the last stage, and plans place one there (value {mtp_layers}); write 1 or 0"
        raise config.error("model.model_config.num_nextn_predict_layers", message)


def _check_swapped(config: RunConfig, chunks: int) -> None:
    """Raise UserError, naming the key, if moved results are not supported in the order of the run."""
    scheduler = config.parallel.pipeline_config.pipeline_scheduler
    if scheduler != ONE_F_ONE_B:
        message = f"--swap requires {ONE_F_ONE_B} (value {scheduler}); write that, or leave out --swap"
        raise config.error("parallel.pipeline_config.pipeline_scheduler", message)
    if chunks > 1:
        message = f"--swap requires one chunk per stage (value {chunks}); write 1, or leave out --swap"
        raise config.error("model.model_config.pp_interleave_num", message)


def _even_run(config: RunConfig, chunks: int) -> RunConfig:
    """Return the run with its layers spread evenly over ``chunks`` per stage, nothing recomputed or moved, same schedule."""
    schedule = config.parallel.pipeline_config.pipeline_scheduler
    keys = {
        **even_keys(config, config.parallel_config.pipeline_stage, chunks),
        "swap_config.swap": False,
        "swap_config.layer_swap": None,
        "swap_config.op_swap": None,
        "parallel.pipeline_config.pipeline_scheduler": schedule,
    }
    return override_config(config, keys)


def formula_problem(
    even_run: RunConfig,
    device: Device,
    limit: float,
    name: str,
    kinds: Mapping[str, LayerKind] = KINDS,
    swap: bool = False,
) -> Problem:
    """Return the problem of a run without recomputation; ``limit`` is bytes of a device, some of which stay free."""
    return plan_problem(workload_of(even_run), device, usable_memory(limit), name, kinds, swap)


def plan_problem(
    workload: Workload,
    device: Device,
    limit: float,
    name: str,
    kinds: Mapping[str, LayerKind] = KINDS,
    swap: bool = False,
) -> Problem:
    """Return the problem of a workload; times are milliseconds, ``limit`` is bytes of a device.

    ``kinds`` are the recompute kinds by name; only the standard ones have a form in a YAML. With ``swap`` each kind except full
    recomputation also comes with attention's results on the host.

    Raises:
        UserError: there are fewer layers than places, or more micro-batches than can be simulated.
    """
    work = step_work(workload)
    timed = TimedWork(work, device)
    plan, sizes = workload.plan, workload.strategy
    treatments = {name: Treatment(kind) for name, kind in kinds.items()}
    if swap:
        treatments |= _swapped(workload, timed, kinds)
    residue = [left_of_ends(workload, stage) for stage in range(plan.stages)]
    # what nothing hides, of layers spread evenly: exchanges, the update and the overhead of a step
    exposed = max(end.seconds for end in timed.ends) + device.step_overhead.value
    fields: dict[str, Any] = {
        "name": name,
        "stages": plan.stages,
        "chunks": plan.chunks,
        "micro_batches": sizes.micro_batches,
        "pieces": sizes.pieces,
        "schedule": sizes.schedule,
        "layers": _layer_fields(workload, timed, treatments),
        "head": {
            **_end_times(work.parts["embedding"], timed),
            "memory_mb": (state_bytes(embedding_parameters(workload), workload) + residue[0]) / MIB,
            "activation_mb": kept_of_embedding(workload) / MIB,
        },
        "tail": {
            **_end_times(work.parts["head"], timed),
            "memory_mb": (state_bytes(last_parameters(workload), workload) + residue[plan.last_stage]) / MIB,
            "activation_mb": kept_at_the_loss(workload) / MIB,
            "transient_mb": loss_bytes(workload) / MIB,
        },
        "static_mb": tuple(size / MIB for size in mask_bytes(workload)),
        **_stage_fields(workload),
        "limit_mb": limit / MIB,
        "recompute_kinds": _yaml_kinds(kinds, treatments),
        "point_to_point": MILLISECONDS * timed.delay,
        "exposed_communication": MILLISECONDS * exposed / sizes.accumulation,
    }
    return make_problem(fields, name)


def _stage_fields(workload: Workload) -> dict[str, tuple[float, ...]]:
    """Return the MB of every stage without its layers when a step starts (``start_mb``) and in the update (``update_mb``)."""
    plan = workload.plan
    ends: list[list[Held]] = [[] for _ in range(plan.stages)]
    ends[0].append(embedding_parameters(workload))
    ends[plan.last_stage].append(last_parameters(workload))
    update = update_working_bytes(workload)
    if copied_at_norm(Held(trained=1.0), workload) > 0.0:
        # the norm reads copies of accumulators, which are freed before weights are updated
        working = squares_at_norm(workload)
        in_update = tuple((update + sum(more_at_update(end, workload) for end in own)) / MIB for own in ends)
    else:
        working = max(update, squares_at_norm(workload))
        in_update = (0.0,) * plan.stages
    at_start = tuple(
        (working + sum(_gradient_bytes(end, workload) for end in own) - left_of_ends(workload, stage)) / MIB
        for stage, own in enumerate(ends)
    )
    return {"start_mb": at_start, "update_mb": in_update}


def _gradient_bytes(parameters: Held, workload: Workload) -> float:
    """Return the bytes of gradients in the update beyond their state, and of copies for the norm."""
    return more_at_update(parameters, workload) + copied_at_norm(parameters, workload)


def _end_times(part: Part, timed: TimedWork) -> dict[str, float]:
    """Return the milliseconds of the passes through an end, and of its weight gradients."""
    forward, backward = timed.passes(part)
    return {
        "forward": MILLISECONDS * forward.seconds,
        "backward": MILLISECONDS * backward.seconds,
        "weight_gradient": MILLISECONDS * min(timed.weight_gradients(part), backward.seconds),
    }


def _yaml_kinds(kinds: Mapping[str, LayerKind], treatments: Mapping[str, Treatment]) -> dict[str, Any] | None:
    """Return the YAML form of every treatment; None if it is unknown for some kind."""
    if not all(KINDS.get(name) == kind for name, kind in kinds.items()):
        return None
    forms = {kind: STANDARD_KINDS[name].model_dump() for name, kind in kinds.items()}
    return {name: {**forms[treatment.kind], "swap": treatment.swap} for name, treatment in treatments.items()}


def _layer_fields(workload: Workload, timed: TimedWork, treatments: Mapping[str, Treatment]) -> list[dict[str, Any]]:
    """Return the costs of every run of equal layers."""
    plan, sizes = workload.plan, workload.strategy
    most_pieces = 1  # that any place keeps at the same time
    if sizes.pieces > 1:
        orders = stage_orders(sizes.schedule, plan.stages, plan.chunks, sizes.micro_batches, sizes.pieces)
        most_pieces = max(int(vectors.max()) for vectors in alive(orders, plan.chunks))
    fields = []
    runs = [(spec, len(list(layers))) for spec, layers in groupby(workload.architecture.layers)]
    names = [spec.name if len(runs) > 1 else "layer" for spec, _ in runs]
    for number, (spec, count) in enumerate(runs):
        name, repeated = names[number], names.count(names[number]) > 1
        part = spec_part(workload, spec, LayerAssignment(0))
        forward, backward = (work.seconds for work in timed.passes(part))
        parameters = layer_parameters(spec, workload.strategy, workload.architecture.pet, workload.update)
        residue = left_of_layer(workload, spec)
        state = state_bytes(parameters, workload) + residue + 2 * seen_by_a_piece(workload, spec)
        fields.append(
            {
                "name": f"{name} {names[: number + 1].count(name)}" if repeated else name,
                "count": count,
                "forward": MILLISECONDS * forward,
                "weight_gradient": MILLISECONDS * min(timed.weight_gradients(part), backward),
                "parameter_mb": state / MIB,
                "start_mb": (_gradient_bytes(parameters, workload) - residue) / MIB,
                "kinds": {
                    name: _kind_costs(workload, timed, spec, treatment, most_pieces)
                    for name, treatment in treatments.items()
                },
            }
        )
    return fields


def _kind_costs(
    workload: Workload, timed: TimedWork, spec: LayerSpec, treatment: Treatment, most_pieces: int
) -> dict[str, float]:
    """Return the costs of a layer with one treatment.

    All pieces of a sequence but one keep their own matrices in half precision (``timing/memory.py``). These are shared over the
    pieces of the fullest place, so memory is exact there and too high elsewhere. Gradients that passes leave count as present,
    except those of the layer in its backward pass. That is exact for the first layer and too high for later ones.
    """
    assignment = LayerAssignment.of_kind(treatment.kind, 0)
    part = spec_part(workload, spec, assignment, treatment.moves)
    backward = timed.passes(part)[1].seconds + _copy_wait(timed, part)
    activation, working = layer_needs(workload, spec, assignment)
    activation, working = activation - moved_bytes(part.moved), working + moved_bytes(part.moved)
    if not assignment.recompute:
        activation -= cast_for_a_piece(workload, spec) / most_pieces
    working += min(0.0, activation)  # gradients of the only pass of a step count as present
    return {
        "backward": MILLISECONDS * backward,
        "activation_mb": max(0.0, activation) / MIB,
        "transient_mb": max(0.0, working - left_of_layer(workload, spec)) / MIB,
        "again": MILLISECONDS * min(timed.again_seconds(part), backward),
    }


def _swapped(workload: Workload, timed: TimedWork, kinds: Mapping[str, LayerKind]) -> dict[str, Treatment]:
    """Return the kinds that keep attention's results, with these on the host, by name.

    Raises:
        UserError: the device has no bandwidth to its host, or no layer has such results.
    """
    prefetch = 1  # operators that the longest copy takes
    for spec in workload.architecture.layers:
        part = spec_part(workload, spec, LayerAssignment(0), ((ATTENTION, 1),))
        longest = max(result.bytes for result in part.moved) / timed.device.host_rate
        prefetch = max(prefetch, math.ceil(longest / _operator_seconds(timed, part)))
    return {
        "host" if kind == LayerKind() else f"{name}, host": Treatment(kind, prefetch)
        for name, kind in kinds.items()
        if not kind.recompute
    }


def _operator_seconds(timed: TimedWork, part: Part) -> float:
    """Return the mean time of an operator of the backward pass."""
    return timed.passes(part)[1].seconds / len(part.backward)


def _copy_wait(timed: TimedWork, part: Part) -> float:
    """Return the seconds that both passes of a single layer wait for copies."""
    if not part.moved:
        return 0.0
    forward, backward = (work.seconds for work in timed.passes(part))
    rate = timed.device.host_rate
    copied = moved_bytes(part.moved) / rate
    late = late_seconds(part.moved, rate, _operator_seconds(timed, part))
    return SWAP_PRICE * backward + max(0.0, copied - forward) + max(0.0, copied - backward, late)


def evaluate_run(config: RunConfig, device: Device) -> Evaluation | None:
    """Evaluate a run as it is, with the costs and the limit of its plans; None if it moves results or is not steady."""
    if config.swap_config.swap:
        return None
    limit = usable_memory(memory_limit(config, device))
    kinds = dict(KINDS)
    plan = run_plan(config, kinds)
    even_run = _even_run(config, config.model.config.pp_interleave_num)
    # a V recomputes relative to the kind that recomputes nothing
    used = {name for place in plan.places for name in place} | {NONE}
    kinds = {name: kind for name, kind in kinds.items() if name in used}
    problem = plan_problem(workload_of(even_run), device, limit, config.trainer.model_name or "run", kinds)
    try:
        return evaluate(problem, plan)
    except NotSteady:
        return None


def run_plan(config: RunConfig, kinds: dict[str, LayerKind]) -> Plan:
    """Return the plan of a run as it is; recompute kinds that ``kinds`` lacks are added to it as ``as written``."""
    layers, places = make_plan(config), dict[tuple[int, int], list[str]]()
    for layer, kind in zip(layers.layers, layers.kinds(), strict=True):
        name = next((name for name, known_kind in kinds.items() if known_kind == kind), None)
        if name is None:
            added = len(kinds) - len(KINDS)
            name = f"as written {added + 1}" if added else "as written"
            kinds[name] = kind
        places.setdefault((layer.chunk, layer.stage), []).append(name)
    return Plan(tuple(tuple(places[place]) for place in sorted(places)))
