"""What every run that trains is chosen alike: the rows of the table, the layout, the batch that fits, and when it is saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindllm.config import RunConfig
from mindllm.recipes.fit import fitting
from mindllm.recipes.rates import LOW_RANK, PET, PRETRAIN, Case, figure, keys_of
from mindllm.recipes.recipe import Choice

RANK, ALPHA, TWICE = f"{PET}.lora_rank", f"{PET}.lora_alpha", 2
RATE = "lr_schedule.learning_rate"
WHOLE_OCTETS = 8  # devices above which MindSpore takes multiples of this alone
SMALLEST = (PRETRAIN, *LOW_RANK)  # methods beside which none takes less memory
FEW_STEPS = 200  # of which every one has a line in the log
Given = Callable[[str], Any]


def usable_devices(here: int) -> int:
    """Return how many of the devices that are here a run takes: MindSpore compiles for 1, 2, 4 or a multiple of 8."""
    if here >= WHOLE_OCTETS:
        return here // WHOLE_OCTETS * WHOLE_OCTETS
    return next((count for count in (4, 2) if here >= count), 1)


def layout_choices(here: int, sharded_state: bool) -> Iterator[Choice]:
    """Yield how devices share the work: each has the whole model and its part of the rows."""
    devices = usable_devices(here)
    if devices == 1:
        yield Choice("use_parallel", False, "one device")
        yield Choice("parallel.enable_parallel_optimizer", False, "one device")
        return
    yield Choice("use_parallel", True, f"{here} devices are here")
    yield Choice("parallel_config.data_parallel", devices, "each has the model and its part of the rows")
    why = "each keeps its part of the moments" if sharded_state else "adapters have few moments"
    yield Choice("parallel.enable_parallel_optimizer", sharded_state, why)


def rate_choices(case: Case, given: Given, limits: Mapping[str, int]) -> Iterator[Choice]:
    """Yield the rows of the table that are keys; ``limits`` are the most that some may be with this model."""
    for row in keys_of(case):
        most, rank = limits.get(row.name), given(RANK)
        if row.name == ALPHA and rank:
            yield Choice(row.name, float(TWICE * rank), row.why)
        elif most is not None and row.value > most:
            yield Choice(row.name, most, f"at most, with this model; usually {row.value}: {row.why}")
        else:
            yield Choice(row.name, row.value, row.why)
        if row.name == RATE:
            peak = given(RATE) or row.value
            part = figure("end of the rate", case)
            yield Choice("lr_schedule.lr_end", float(f"{peak * part:.3g}"), f"{part:.0%} of the peak")


@dataclass(frozen=True)
class Batch:
    """Rows that a device takes at a time, how many such parts make a step, and the choices that say so."""

    rows: int
    parts: int
    choices: tuple[Choice, ...]


def batch_choices(
    case: Case, given: Given, global_batch: int, devices: int, probe: Callable[[list[Choice]], RunConfig]
) -> Batch:
    """Return the largest part of a step that fits; ``probe`` gives the run with some choices, to be asked for its memory.

    Raises:
        UserError: not even one row fits, and nobody asked for it.
    """
    own = max(1, global_batch // devices)
    asked, asked_parts = given("runner_config.batch_size"), given("runner_config.gradient_accumulation_steps")
    if asked:
        parts = asked_parts or max(1, round(own / asked))
        why = f"{asked * parts * devices} rows make a step"
        return Batch(asked, parts, tuple(_parts(asked, parts, "asked for", why)))
    if asked_parts:
        own = max(1, own // asked_parts) * asked_parts

    def parts_of(rows: int) -> int:
        return asked_parts or own // rows

    most = min(own // (asked_parts or 1), figure("rows at once", case))
    sizes = [rows for rows in range(most, 0, -1) if own % rows == 0]
    candidates = [*((rows, False) for rows in sizes), (1, True)]
    fit = fitting(
        candidates,
        lambda rows, again: probe(_parts(rows, parts_of(rows), "", "", again)),
        figure("memory", case),
        "take a smaller model;" if case.method in SMALLEST else "take adapters (--method lora), or a smaller model;",
    )
    why = f"{fit.describe()} that may be taken"
    step = f"{fit.rows * parts_of(fit.rows) * devices} rows make a step"
    return Batch(fit.rows, parts_of(fit.rows), tuple(_parts(fit.rows, parts_of(fit.rows), why, step, fit.recompute)))


def _parts(rows: int, parts: int, why: str, step: str, recompute: bool = False) -> list[Choice]:
    found = [
        Choice("runner_config.batch_size", rows, why),
        Choice("runner_config.gradient_accumulation_steps", parts, step),
    ]
    if recompute:
        found.append(
            Choice("recompute_config.recompute", True, "layers are computed a second time, or it would not fit")
        )
    return found


def saving_choices(case: Case, steps: int, evaluates: bool) -> Iterator[Choice]:
    """Yield when a run of so many steps is evaluated and saved."""
    interval = min(math.ceil(steps / figure("saves", case)), figure("most steps to a save", case))
    kept = figure("kept checkpoints", case)
    if evaluates:
        yield Choice("do_eval", True, "on what is held out")
        yield Choice("eval_step_interval", interval, f"of {steps} steps")
    callbacks = [
        {"type": "MFLossMonitor", "per_print_times": 1 if steps <= FEW_STEPS else 10},
        {"type": "MetricsMonitor"},
        {"type": "CheckpointMonitor", "save_checkpoint_steps": interval, "keep_checkpoint_max": kept},
        {"type": "NaNMonitor"},
    ]
    yield Choice(
        "callbacks",
        callbacks,
        f"a checkpoint every {interval} of {steps} steps, and at the end; the newest {kept} are kept",
    )
