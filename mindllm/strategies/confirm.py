"""Validate the best strategies by MindSpore's dry run.

A strategy that does not fit is planned again, with the error of the formula left free.
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
from mindllm.strategies.search import Planned, plan_candidate
from mindllm.terminal.progress import Progress, unwatched
from mindllm.timing.device import Device
from mindllm.timing.verdict import RESERVED
from mindllm.units import GIB

PLANS = 3  # of a strategy


def validate_by_dry_run(
    config: RunConfig,
    best: Sequence[Planned],
    device: Device,
    limit: float,
    seconds: float,
    progress: Progress = unwatched,
    constraints: Constraints = UNLIMITED,
) -> list[Planned]:
    """Return the strategies that fit, the fastest first, with the memory of the dry run.

    Args:
        config: the run.
        best: strategies planned by the formula of memory.
        device: what steps are predicted on.
        limit: bytes of a device.
        seconds: for each plan.
        progress: gets simulations, and the memory of each strategy.
        constraints: limits of strategies that are planned again.
    """
    simulations = simulations_here(progress=progress)
    validated = [
        _plan_until_fits(config, planned, simulations, device, limit, seconds, constraints) for planned in best
    ]
    return sorted((planned for planned in validated if planned is not None), key=lambda planned: planned.step.seconds)


def simulated(planned: Planned, progress: Progress = unwatched) -> Planned:
    """Return the run with the memory of the dry run."""
    return _measured(planned, simulations_here(progress=progress))


def _measured(planned: Planned, simulations: Simulations) -> Planned:
    stages = forecast_stages(planned.config, stages_of(planned.config), simulations)
    return replace(planned, memory=tuple(float(stage.device_peak) for stage in stages), simulated=True)


def _plan_until_fits(
    config: RunConfig,
    first: Planned,
    simulations: Simulations,
    device: Device,
    limit: float,
    seconds: float,
    constraints: Constraints,
) -> Planned | None:
    """Plan a strategy until it fits; None if none of :data:`PLANS` plans fits."""
    planned: Planned | None = first
    for attempts_left in reversed(range(PLANS)):
        if planned is None:
            break
        measured = _measured(planned, simulations)
        memory = measured.memory
        message = f"{planned.candidate.name}: dry run {max(memory) / GIB:.1f} GB"
        if max(memory) <= limit:
            simulations.progress(f"{message}, fits")
            return measured
        missed = max(real - formula for real, formula in zip(memory, planned.memory, strict=True) if real > limit)
        less = (limit - missed) / (1 - RESERVED)
        planned = _with_less(config, planned, device, less, seconds, constraints) if attempts_left else None
        simulations.progress(
            f"{message}, does not fit{f'; planned again with {missed / GIB:.1f} GIB left free' if planned else ''}"
        )
    return None


def _with_less(
    config: RunConfig, planned: Planned, device: Device, limit: float, seconds: float, constraints: Constraints
) -> Planned | None:
    """Return the strategy planned for less memory; None if nothing fits."""
    try:
        return plan_candidate(config, planned.candidate, device, limit, seconds, constraints)
    except (Infeasible, UserError):
        return None
