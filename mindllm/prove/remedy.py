"""Which keys of a run close a shortage of memory, by formula: found in a second, before any dry run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from mindllm.config import RunConfig, override_config
from mindllm.errors import UserError
from mindllm.timing.device import Device
from mindllm.timing.prediction import StepPrediction, predict
from mindllm.timing.verdict import RESERVED, Room
from mindllm.units import GIB

LIMIT = "context.max_device_memory"
SLICES = 4  # of the loss, for each there is now
RECOMPUTATION: tuple[dict[str, Any], ...] = (
    {},
    {"recompute_config.select_recompute": True},
    {"recompute_config.recompute": True},
    {"recompute_config.recompute": True, "recompute_config.mp_comm_recompute": True},
)


def formula_remedy(config: RunConfig, device: Device, room: Room) -> str:
    """Return the change of keys after which every stage fits by formula, and its figures; of several the fastest.

    Where no change is enough, the one that comes closest. ``room`` is the memory of the run as it is.
    """
    tried = [(keys, found) for keys in _changes(config) if (found := _predicted(config, keys, device)) is not None]
    fitting = [(keys, found) for keys, found in tried if found.fits]
    ways = []
    if fitting:
        keys, found = min(fitting, key=lambda one: one[1].seconds)
        ways.append(f"set {_words(keys)} ({_figures(found)})")
    needed = math.ceil(max(room.stages) / (1 - RESERVED) / GIB)
    if needed * GIB <= device.memory_size.value:
        ways.append(f"set {LIMIT}: {needed}GB ({device.name} has {device.memory_size.value / GIB:g} GB)")
    if ways:
        return ", or ".join(ways)
    more = "more devices are needed: mindllm search --devices N"
    if not tried:
        return more
    keys, found = min(tried, key=lambda one: max(one[1].memory.stages))
    return f"{more}; {_words(keys)} is not enough ({_figures(found)})"


def _changes(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield keys that lower memory: sharded optimizer state, recomputation, the loss in slices, and combinations."""
    shards = config.parallel_config.replica_num > 1 and not config.parallel.enable_parallel_optimizer
    sharded = [{}, {"parallel.enable_parallel_optimizer": True}] if shards else [{}]
    sliced = [{}, {"model.model_config.loss_chunks": SLICES * config.model.config.loss_chunks}]
    for parts in product(sliced, sharded, RECOMPUTATION):
        keys = {key: value for part in parts for key, value in part.items()}
        if keys:
            yield keys


def _predicted(config: RunConfig, keys: Mapping[str, Any], device: Device) -> StepPrediction | None:
    """Return the prediction for the run with these keys; None if they do not suit it."""
    try:
        return predict(override_config(config, dict(keys)), device)
    except UserError:
        return None


def _words(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {str(value).lower()}" for key, value in keys.items())


def _figures(found: StepPrediction) -> str:
    return f"{max(found.memory.stages) / GIB:.1f} GB, {found.seconds:.3f} s a step by formula"
