"""Causes of a low model FLOPs utilization of a predicted step, as shares of the step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from mindllm.architecture.experts import ExpertsSpec
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import MATRIX, Operator
from mindllm.timing.device import Device
from mindllm.timing.stage_times import mean_stage
from mindllm.timing.step import HOST, REPEATED, StepTime
from mindllm.timing.step_work import step_work
from mindllm.timing.workload import Workload

LOW_UTILISATION = 0.1
"""Utilization below which results list the causes."""
SMALLEST_SHARE, MOST_CAUSES = 0.03, 5
BUBBLE, FIXED_COST = "bubble and rest", "the fixed cost of a step"
EMPTY_PLACES = "experts computing places that no token takes"
SMALL_PRODUCTS = "products too small for the device's full speed"
EXPERT_PRODUCTS = "feed_forward.experts."
CAUSES = {
    REPEATED: "recomputation",
    HOST: "launches of the host",
    "attention": "attention",
    "vector": "operators bound by memory",
    "sends": "waiting for sends between stages",
    "replicas": "exchanges between replicas",
    "update": "the update of the weights",
    BUBBLE: "pipeline bubbles and uneven stages",
}


def utilisation_causes(step: StepTime) -> dict[str, float]:
    """Return the causes of a low utilization as shares of the step, the largest first; empty if it is not low."""
    if step.utilisation >= LOW_UTILISATION:
        return {}
    spent, fixed = mean_stage(step), step.device.step_overhead.value
    spent[BUBBLE] -= fixed
    causes = {CAUSES.get(name, f"{name} inside a layer"): seconds for name, seconds in spent.items() if name != MATRIX}
    causes |= {FIXED_COST: fixed, **_wasted_products(step)}
    shares = {cause: seconds / step.seconds for cause, seconds in causes.items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:MOST_CAUSES]
    return {cause: share for cause, share in largest if share >= SMALLEST_SHARE}


def explain_utilisation(step: StepTime, name: str) -> Iterator[str]:
    """Yield a line with the causes of a low utilisation."""
    if causes := utilisation_causes(step):
        shares = ", ".join(f"{share:.0%} {cause}" for cause, share in causes.items())
        yield f"{name} uses {step.utilisation:.1%} of the devices' matrix FLOPs: of its step {shares}"


def _wasted_products(step: StepTime) -> dict[str, float]:
    """Return seconds of products, mean of the stages: rows of empty places, and the loss by small sizes."""
    workload, device = step.workload, step.device.of_ranks(step.workload.strategy.device_num)
    work, wasted = step_work(workload), {EMPTY_PLACES: 0.0, SMALL_PRODUCTS: 0.0}
    runs = workload.strategy.runs / workload.plan.stages
    empty = {key: _empty_share(workload, key) for key in work.parts}
    for place in work.places:
        for key, count in place.items():
            part = work.parts[key]
            for operator in (*part.forward, *part.backward):
                if not isinstance(operator, Operator) or operator.kind != MATRIX:
                    continue
                seconds = operator_seconds(operator, device) * count * runs
                idle = empty[key] if operator.name.startswith(EXPERT_PRODUCTS) else 0.0
                wasted[EMPTY_PLACES] += idle * seconds
                wasted[SMALL_PRODUCTS] += (1 - idle) * max(
                    0.0, seconds - _at_full_speed(operator, device) * count * runs
                )
    return wasted


def _at_full_speed(operator: Operator, device: Device) -> float:
    """Return the seconds of a product at the rate that large ones reach."""
    return operator.flops / (device.matrix_rate(operator.dtype) * device.efficiency.matrix.value)


def _empty_share(workload: Workload, key: Hashable) -> float:
    """Return the share of experts' places that no token takes in a part of the step; 0 unless its layers have such places."""
    spec = workload.architecture.layers[key[0]].feed_forward if isinstance(key, tuple) else None
    if not isinstance(spec, ExpertsSpec) or spec.grouped:
        return 0.0
    places = spec.router.experts * spec.capacity(workload.seq_length)
    return max(0.0, 1 - workload.seq_length * spec.router.top_k / places)
