"""What is chosen by the device that is here: where a run executes, and the type it computes in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mindllm.config.precision import FLOAT32
from mindllm.recipes.model_source import ModelSource
from mindllm.recipes.recipe import Choice

DEVICES = Path("/dev"), "davinci[0-9]*"
CPU, ASCEND = "CPU", "Ascend"


def device_here() -> str:
    """Return ``Ascend`` where a device is, else ``CPU``. Not run on a device."""
    return ASCEND if devices_here() else CPU


def devices_here() -> int:
    """Return how many devices this machine has; 0: there is its CPU alone. Not run on a device."""
    directory, pattern = DEVICES
    return sum(1 for _ in directory.glob(pattern))


def device_choices(model: ModelSource, device: str) -> Iterator[Choice]:
    """Yield where the run executes and in which type."""
    here = "the device of this machine" if device == ASCEND else "no Ascend device is here"
    yield Choice("context.device_target", device, here)
    if device == CPU:
        said = f", which is faster on a CPU than the {model.dtype} of config.json" if model.dtype != FLOAT32 else ""
        yield Choice("model.model_config.compute_dtype", FLOAT32, f"exact{said}")
    else:
        yield Choice("model.model_config.compute_dtype", model.dtype, "the type that config.json names")
