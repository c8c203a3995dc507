"""Moments in 8-bit codes, decoded to numbers, and the gradients that such moments do not reveal.

Two sides that add in another order may round a number between two codes to either of them. So decoded numbers are compared,
with an allowance of one code; and each step of the ranks starts from the single device's state, because a different code is a
visible part of the next update. The gradient of a step comes from AdamW in 32 bits on a device with the same weights.
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
"""Whether the codes of the first and the second moment have a sign."""
Value = TypeVar("Value")


def decode_state(state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Return state with moments (``adam_m.*``, ``adam_v.*``) in place of codes and scales."""
    return _replace_codes(state, decoded)


def decode_parts(parts: Mapping[str, Part]) -> Mapping[str, Part]:
    """Return a rank's parts with moments in place of codes and scales. Its parts consist of whole blocks."""

    def decode(codes: Part, scales: Part, signed: bool) -> Part:
        return replace(codes, value=decoded(np.asarray(codes.value), np.asarray(scales.value), signed))

    return _replace_codes(parts, decode)


def distances_to_next_code(state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Return, by the name of a moment, the distance of each number to that of the next code."""
    return {name: item for name, item in _replace_codes(state, steps_beside).items() if name not in state}


def _replace_codes(state: Mapping[str, Value], function: Callable[[Any, Any, bool], Any]) -> Mapping[str, Value]:
    result = dict(state)
    for moment, codes, scales, signed in zip(MOMENTS, CODES, SCALES, SIGNED, strict=True):
        for name in [key.removeprefix(f"{codes}.") for key in state if key.startswith(f"{codes}.")]:
            result[f"{moment}.{name}"] = function(result.pop(f"{codes}.{name}"), result.pop(f"{scales}.{name}"), signed)
    return result


class AppliedGradients:
    """Gradients of a step, read from first moments that start as zeros."""

    def __init__(self, config: RunConfig) -> None:
        block_size = OptimizerConfig.model_fields["state_block_size"].default
        full = {"optimizer.state_bits": 32, "optimizer.state_block_size": block_size}
        self.device = SingleDevice(override_config(config, full))
        self.share = 1.0 - config.optimizer.betas[0]

    def compute(self, task: Task, before: Arrays) -> Arrays:
        """Return gradients in fp64 by weight, from weights ``before`` a step that does not overflow."""
        engine, first = self.device.engine, f"{MOMENTS[0]}."
        zeros = {name: np.zeros_like(item) for name, item in self.device.state().items() if name.startswith(first)}
        engine.load_state({**{name: before[name] for name in engine.weights}, **zeros})
        self.device.step(task)
        after = self.device.state()
        return {name.removeprefix(first): after[name].astype(np.float64) / self.share for name in zeros}
