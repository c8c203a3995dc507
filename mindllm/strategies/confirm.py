"""The best strategies held to MindSpore's dry run.

One that does not fit is planned again, with as much memory left free as the formula was wrong by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindllm.config import RunConfig
from mindllm.dry_run.forecast import forecast_stages
from mindllm.dry_run.simulations import Simulations, simulations_here
from mindllm.errors import UserError
from mindllm.parallel.stages import stages_of
from mindllm.planning.solve import Infeasible
from mindllm.strategies.constraints import UNLIMITED, Constraints
from mindllm.strategies.search import Planned, plan_one
from mindllm.terminal.progress import Progress, unwatched
from mindllm.timing.device import Device
from mindllm.timing.verdict import RESERVED
from mindllm.units import GIB

PLANS = 3  # of a strategy


def held_to_dry_run(
    config: RunConfig,
    best: Sequence[Planned],
    device: Device,
    limit: float,
    seconds: float,
    progress: Progress = unwatched,
    constraints: Constraints = UNLIMITED,
) -> list[Planned]:
    """Those that fit, the fastest first, with the memory that the dry run finds.

    Args:
        config: the run whose strategies they are.
        best: planned by the formula of memory.
        limit: of a device, bytes.
        seconds: for each plan.
        progress: told of simulations, and of what each strategy needs.
        constraints: what a strategy that is planned again may recompute.
    """
    simulations = simulations_here(progress=progress)
    found = [_held(config, one, simulations, device, limit, seconds, constraints) for one in best]
    return sorted((one for one in found if one is not None), key=lambda planned: planned.step.seconds)


def simulated(one: Planned, progress: Progress = unwatched) -> Planned:
    """The same run with the memory that the dry run finds."""
    return _measured(one, simulations_here(progress=progress))


def _measured(one: Planned, simulations: Simulations) -> Planned:
    stages = forecast_stages(one.config, stages_of(one.config), simulations)
    return replace(one, memory=tuple(float(stage.device_peak) for stage in stages), simulated=True)


def _held(
    config: RunConfig,
    first: Planned,
    simulations: Simulations,
    device: Device,
    limit: float,
    seconds: float,
    constraints: Constraints,
) -> Planned | None:
    """One strategy, planned until it fits; None where it does not in :data:`PLANS` plans."""
    one: Planned | None = first
    for left in reversed(range(PLANS)):
        if one is None:
            break
        measured = _measured(one, simulations)
        memory = measured.memory
        told = f"{one.candidate.name}: dry run {max(memory) / GIB:.1f} GB"
        if max(memory) <= limit:
            simulations.progress(f"{told}, fits")
            return measured
        missed = max(real - formula for real, formula in zip(memory, one.memory, strict=True) if real > limit)
        less = (limit - missed) / (1 - RESERVED)
        one = _with_less(config, one, device, less, seconds, constraints) if left else None
        simulations.progress(
            f"{told}, does not fit{f'; planned again with {missed / GIB:.1f} GIB left free' if one else ''}"
        )
    return None


def _with_less(
    config: RunConfig, one: Planned, device: Device, limit: float, seconds: float, constraints: Constraints
) -> Planned | None:
    """The same strategy planned for less memory; None where nothing fits that."""
    try:
        return plan_one(config, one.candidate, device, limit, seconds, constraints)
    except (Infeasible, UserError):
        return None
