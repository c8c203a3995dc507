"""How many rows a device takes at a time: as many as fit its memory, by the formula that ``timing`` has of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mindllm.config import RunConfig, override_config
from mindllm.errors import UserError
from mindllm.jobs.memory import available_bytes, claim_directory, claimed_by_others, gibibytes, memory_share
from mindllm.recipes.device import CPU
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES
from mindllm.timing.memory import stage_bytes, state_bytes
from mindllm.timing.step_work import step_work
from mindllm.units import GIB

PROCESS = (
    2 * GIB
)  # of Python, MindSpore and its compiler beside all tensors: measured on a CPU with 135 million parameters


@dataclass(frozen=True)
class Fit:
    """Rows at a time and what a step takes then, of how much there is. ``recompute``: layers are computed a second time."""

    rows: int
    needed: int
    budget: int | None
    recompute: bool = False

    def describe(self) -> str:
        """In words: ``about 2.1 GB of 9.8 GB``."""
        return f"about {gibibytes(self.needed)} of {gibibytes(self.budget)}"


def budget_of(config: RunConfig) -> int | None:
    """Bytes a run may take: of what is free on the host of a CPU, or on the device; None where the system does not say."""
    if config.context.device_target != CPU:
        return config.context.device_memory
    free = available_bytes()
    if free is None:
        return None
    with claim_directory() as directory:
        return int(memory_share() * max(0, free - claimed_by_others(directory)))


def needed_bytes(config: RunConfig) -> int:
    """What a step takes on one device, state and all.

    On a CPU results are held in single precision, so that they take twice what the formula, which is about devices, has; of pairs
    of answers the reference is the same weights, and its results are not kept.
    """
    pet = config.model.config.pet_config
    if pet is not None and pet.use_dora:  # the formula knows plain adapters; lengths of rows are few numbers
        config = override_config(config, {"model.model_config.pet_config.use_dora": False})
    workload = workload_of(config)
    total = max(stage_bytes(workload))
    if config.context.device_target != CPU:
        return int(total)
    state = max(state_bytes(update.parameters, workload) for update in step_work(workload).updates)
    architecture = config.model.config.architecture
    trained = architecture.trained_parameter_count()
    accumulates = config.runner_config.gradient_accumulation_steps > 1
    held = architecture.parameter_count() + trained * (3 + accumulates)  # gradient, two moments; sums of gradients
    return PROCESS + held * FP32_BYTES + int((total - state) * FP32_BYTES / HALF_BYTES)


def fitting(
    candidates: Iterable[tuple[int, bool]], config_of: Callable[[int, bool], RunConfig], share: float, advice: str
) -> Fit:
    """Return the first of ``candidates`` (rows at a time, recomputation) whose run fits ``share`` of a device, or the host.

    ``advice``: what a person can ask for instead.

    Raises:
        UserError: none does; says what the smallest takes.
    """
    least: Fit | None = None
    for rows, recompute in candidates:
        config = config_of(rows, recompute)
        budget = budget_of(config)
        if budget is not None and config.context.device_target != CPU:
            budget = int(share * budget)
        found = Fit(rows, needed_bytes(config), budget, recompute)
        if budget is None or found.needed <= budget:
            return found
        least = found if least is None or found.needed < least.needed else least
    assert least is not None
    assert least.budget is not None
    raise UserError(
        f"training this takes about {gibibytes(least.needed)} of memory with one row at a time, and there are "
        f"{gibibytes(least.budget)} for it; {advice} --batch_size 1 tries it all the same"
    )
