"""Moments in codes as the numbers that they stand for, and the gradients that they cannot tell.

Two sides that add in another order may round a number between two codes to either. So numbers are compared, with room for the
code beside; and each step of the ranks begins with the single device's state, as a code that differs is a visible part of the
next update. The gradient of a step is told by AdamW in 32 bits: a device of its own, which begins with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from mindllm.architecture.optimizer_state import CODES, MOMENTS, SCALES
from mindllm.config import RunConfig, override_config
from mindllm.config.optimizer import OptimizerConfig
from mindllm.train.checkpoint.parts import Part
from mindllm.train.optimizers.dynamic_map import decoded, steps_beside
from mindllm.verify.single import Arrays, SingleDevice, Task

SIGNED = (True, False)
"""Of both moments."""
Held = TypeVar("Held")


def in_numbers(state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """State with moments, ``adam_m.*`` and ``adam_v.*``, in place of codes and scales."""
    return _replaced(state, decoded)


def parts_in_numbers(parts: Mapping[str, Part]) -> Mapping[str, Part]:
    """The same of what a rank has: it has whole blocks."""
    return _replaced(
        parts, lambda codes, scales, signed: replace(codes, value=decoded(_array(codes), _array(scales), signed))
    )


def room_of_codes(state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """By the name of a moment how far the number of the code beside is, for each of its codes."""
    return {name: item for name, item in _replaced(state, steps_beside).items() if name not in state}


def _array(part: Part) -> np.ndarray:
    return np.asarray(part.value)


def _replaced(state: Mapping[str, Held], made: Callable[[Any, Any, bool], Any]) -> Mapping[str, Held]:
    found = dict(state)
    for moment, kind, scales, signed in zip(MOMENTS, CODES, SCALES, SIGNED, strict=True):
        for name in [one.removeprefix(f"{kind}.") for one in state if one.startswith(f"{kind}.")]:
            found[f"{moment}.{name}"] = made(found.pop(f"{kind}.{name}"), found.pop(f"{scales}.{name}"), signed)
    return found


class AppliedGradients:
    """Gradients of a step as they are applied: of moments that begin as zeros, what the first one becomes tells them."""

    def __init__(self, config: RunConfig) -> None:
        whole = {"optimizer.state_bits": 32, "optimizer.state_block_size": _default("state_block_size")}
        self.device = SingleDevice(override_config(config, whole))
        self.share = 1.0 - config.optimizer.betas[0]

    def of(self, task: Task, before: Arrays) -> Arrays:
        """By the name of a weight, fp64, from weights ``before`` a step that does not overflow."""
        engine, first = self.device.engine, f"{MOMENTS[0]}."
        begins = {name: np.zeros_like(item) for name, item in self.device.state().items() if name.startswith(first)}
        engine.load_state({**{name: before[name] for name in engine.weights}, **begins})
        self.device.step(task)
        after = self.device.state()
        return {name.removeprefix(first): after[name].astype(np.float64) / self.share for name in begins}


def _default(key: str) -> Any:
    return OptimizerConfig.model_fields[key].default
