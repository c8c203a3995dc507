"""The problem of a run YAML: memory from small simulated runs, time from small compiled ones on a described device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindllm.architecture.layer_counts import ZERO_BUBBLE_V
from mindllm.compiled.simulation.simulate_rank import check_simulated
from mindllm.config import RunConfig, override_config
from mindllm.dry_run.simulations import Simulations
from mindllm.planning.costs.formula import judged
from mindllm.planning.costs.layer_kinds import check_planned, layer_runs, layers_by_name, offered_kinds
from mindllm.planning.costs.memory_costs import LayerMemory, MemoryFit, fit_memory
from mindllm.planning.costs.small_runs import run_small
from mindllm.planning.costs.time_costs import LayerTimes, TimeCosts, time_costs
from mindllm.planning.costs.weight_shares import weight_shares
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem, make_problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.solve import Infeasible
from mindllm.timing.device import Device
from mindllm.timing.verdict import memory_limit
from mindllm.units import GIB, MIB, device_mebibytes

PLANNED = ("1f1b", ZERO_BUBBLE_V)


@dataclass(frozen=True)
class Configured:
    """A run to plan, what its parts cost, and the problem made of both. MB are 2**20 bytes, times are milliseconds.

    Attributes:
        limit_mb: ``max_device_memory``; the limit of ``problem`` leaves room for gaps between blocks.
    """

    config: RunConfig
    device: Device
    problem: Problem
    memory: MemoryFit
    times: TimeCosts
    limit_mb: float

    def interleaved(self, chunks: int) -> Configured:
        """The same run with another number of chunks per stage; layers cost what they did.

        Raises:
            UserError: there are fewer layers than chunks, or a V, which has two.
        """
        static = self.memory.static(self.config.parallel_config, chunks, self.problem.v_shape)
        changes = {"chunks": chunks, "static_mb": static}
        fields = {**self.problem.model_dump(), **changes}
        return replace(self, problem=make_problem(fields, f"pp_interleave_num {chunks}"))

    def as_it_is(self) -> Evaluation | None:
        """The plan that the YAML has; None where that is not known."""
        return judged(self.config, self.problem)

    def infeasible(self, error: Infeasible) -> Infeasible:
        """``error`` with the memory that would do."""
        limit = max(self.problem.per_stage("limit_mb")) + lightest_split(self.problem).missing_mb
        needed = math.ceil((limit + self.memory.runs.gaps_mb) / (GIB // MIB) * 10) / 10
        return Infeasible(f"{error}; with gaps between blocks that is --max_memory {needed:g}GB")


def configured_problem(config: RunConfig, device: Device, simulations: Simulations) -> Configured:
    """Simulates and compiles small runs of ``config``, and makes a problem of what they cost.

    Raises:
        UserError: the run has no pipeline, no Ascend target, several layers that predict ahead, or excludes operators from
            recomputation.
        CompileFailed: the compiler's own error.
    """
    _check(config)
    kinds, layers, runs = offered_kinds(config), layers_by_name(config), layer_runs(config)
    memory = fit_memory(run_small(config, layers, kinds, simulations))
    times = time_costs(config, layers, kinds, device)
    limit = memory_limit(config, device) / MIB
    sizes, model = config.parallel_config, config.model.config
    shares = weight_shares(config, layers, device)
    updates = sum(times.layers[layer].step * count for layer, count in runs)
    fields: dict[str, Any] = {
        "name": config.trainer.model_name or "run",
        "stages": sizes.pipeline_stage,
        "chunks": model.pp_interleave_num,
        "micro_batches": sizes.micro_batch_num,
        "schedule": config.parallel.pipeline_config.pipeline_scheduler,
        "layers": [
            {
                "name": name,
                "count": count,
                "weight_gradient": shares.layers[layer] * times.layers[layer].backward,
                **_layer_costs(memory.layers[layer], times.layers[layer]),
            }
            for name, (layer, count) in zip(_names(runs), runs, strict=True)
        ],
        "head": _end(times.head, shares.head),
        "tail": {**_end(times.tail, shares.tail), "transient_mb": memory.tail},
        "static_mb": memory.static(sizes, model.pp_interleave_num, config.parallel.pipeline_config.v_shape),
        "start_mb": memory.at_start(sizes.pipeline_stage, config.parallel.pipeline_config.v_shape),
        "limit_mb": (max(0.0, limit - memory.runs.gaps_mb),) * sizes.pipeline_stage,
        "recompute_kinds": {name: kind.model_dump() for name, kind in kinds.items()},
        "point_to_point": times.point_to_point,
        "exposed_communication": updates / sizes.pipeline_stage + times.step_of_end,
    }
    problem = make_problem(fields, "the run")
    return Configured(config, device, problem, memory, times, limit)


def _names(runs: Sequence[tuple[str, int]]) -> list[str]:
    """Different names for runs of layers: the layer's, with a number where it comes again."""
    layers, met = [layer for layer, _ in runs], Counter[str]()
    names = []
    for name in layers:
        met[name] += 1
        names.append(name if layers.count(name) == 1 else f"{name} {met[name]}")
    return names


def _end(times: tuple[float, float], weights: float) -> dict[str, float]:
    """What the passes of an end take, of whose backward pass gradients of weights are a share."""
    forward, backward = times
    return {"forward": forward, "backward": backward, "weight_gradient": weights * backward}


def _layer_costs(memory: LayerMemory, times: LayerTimes) -> dict[str, Any]:
    """What a layer costs, as a problem has it."""
    return {
        "forward": times.forward,
        "parameter_mb": memory.parameter,
        "start_mb": memory.start,
        "kinds": {
            name: {
                "backward": times.backward + again,
                "activation_mb": memory.activation[name],
                "transient_mb": memory.transient[name],
                "again": again,
            }
            for name, again in times.again.items()
        },
    }


def with_memory(config: RunConfig, size: str | None) -> RunConfig:
    """``config`` with another ``max_device_memory``, given as ``58GB`` or ``58000MB`` (of 2**20 bytes)."""
    if size is None:
        return config
    gb = device_mebibytes(size) * MIB / GIB
    return override_config(config, {"context.max_device_memory": f"{gb:g}GB"})


def _check(config: RunConfig) -> None:
    check_planned(config)
    scheduler = config.parallel.pipeline_config.pipeline_scheduler
    if scheduler not in PLANNED:
        message = f"small runs have no costs of it (value {scheduler}); add --formula, or write {' or '.join(PLANNED)}"
        raise config.error("parallel.pipeline_config.pipeline_scheduler", message)
    check_simulated(config)
