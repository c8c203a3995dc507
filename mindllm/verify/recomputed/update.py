"""A single device's update once more in float64, from its own moments: what it would get wrong together with the cluster.

The gradient that was applied is what the first moment gained of it, ``g = (m' - β₁·m) / (1 - β₁)``. Its norm says how it was
clipped, and it gives the second moment and the weight anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import (
    CODES,
    MASTER,
    MOMENT_PREFIXES,
    MUON_MOMENT,
    POWERS,
    SCALES,
    updated_weights,
)
from mindllm.architecture.query_key_rows import query_key_rows
from mindllm.config import RunConfig
from mindllm.train.optimizers.dynamic_map import decoded, steps_beside
from mindllm.verify.recomputed.coded_state import SIGNED

FIRST, SECOND = MOMENT_PREFIXES
CLIP_EPSILON = 1e-6
MOVED_OTHERWISE = "router.bias"  # ends the names of weights that no gradient changes
TOLERANCE = 1e-4
"""Of a norm, of the largest second moment of a weight, and of the largest change of a weight: what fp32 leaves."""
ORTHOGONAL_TOLERANCE, TINY = 1e-3, 1e-7
"""Of the largest change of a matrix: Newton-Schulz steps make rounding of small singular values hundreds of times as large."""
NEAREST = 0.51
"""Of the way to the code beside: no other code is nearer, but for rounding."""
GRADIENT_TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
"""Of the largest element of a gradient, by compute dtype."""
ULPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Relative distance of neighbors in the types that round a weight after its update, and its gradient before."""
ROUNDING = 1e-6
"""Of the largest weight: what is left of a difference of two weights."""


def update_problems(
    config: RunConfig,
    updates: int,
    rate_of: Callable[[str], float],
    norm: float,
    before: Mapping,
    after: Mapping,
    known: Mapping[str, np.ndarray] = MappingProxyType({}),
    clips: bool = True,
    applied: Mapping[str, np.ndarray] = MappingProxyType({}),
    largest: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield where an update is not that of AdamW, or of Muon, with the YAML's clipping, betas, epsilon and decays, and QK-clip.

    Args:
        config: the run; that of adapters and other tuners has updates of its own, and is not looked at.
        updates: that were done, this one included.
        rate_of: the learning rate of a weight.
        norm: of the step's gradients, as the step told it.
        before: weights and state before the step, by name.
        after: the same after it.
        known: gradients of some weights by name, before clipping, that were computed another way.
        clips: whether the step clips where the run does.
        applied: gradients of all weights by name, behind clipping, which moments in codes do not tell.
        largest: attention logits of the step, ``[heads]`` by layer, where QK-clip scales heads by them.
    """
    if config.model.config.pet_config is not None:
        return
    updated = set(updated_weights(after))
    names = [name for name in before if name in updated and not name.endswith(MOVED_OTHERWISE)]
    parts = {name: _part(config, name, before, after, applied) for name in names}
    length = float(np.sqrt(sum(np.sum(part.gradient**2) for part in parts.values())))
    wrapper = config.runner_wrapper
    clipped = min(1.0, wrapper.max_grad_norm / (norm + CLIP_EPSILON)) if wrapper.use_clip_grad and clips else 1.0
    rounding = ULPS.get(config.model.config.param_init_type, 0.0)
    if not abs(length - norm * clipped) <= (TOLERANCE + rounding) * norm * clipped:
        yield f"gradients were applied with the norm {length:.6g}; of {norm:.6g}, clipping leaves {norm * clipped:.6g}"
    allowed = GRADIENT_TOLERANCES[config.model.config.compute_dtype] + rounding
    for name, gradient in known.items():
        if name in parts:
            yield from _gradient_problems(name, parts[name].gradient, gradient * clipped, allowed)
    rows = head_factors(config, largest)
    for name, part in parts.items():
        part.kept_of_rows = rows.get(name, part.kept_of_rows)
        yield from part.problems(name, updates, rate_of(name))


def head_factors(config: RunConfig, largest: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What QK-clip multiplies the rows of weights by, float64 ``[rows]`` by name."""
    threshold, architecture = config.optimizer.qk_clip_threshold, config.model.config.architecture
    if threshold is None:
        return {}
    shapes, found = architecture.trained_shapes(), {}
    for name, rows in query_key_rows(architecture).items():
        logits = np.asarray(largest[name.split(".")[2]], np.float64).reshape(rows.groups, -1).max(1)
        factor = (threshold / np.maximum(logits, threshold)) ** rows.power
        found[name] = np.repeat(factor, shapes[name][0] // rows.groups)
    return found


def _gradient_problems(name: str, found: np.ndarray, wanted: np.ndarray, tolerance: float) -> Iterator[str]:
    if not _largest(found - wanted) <= tolerance * _largest(wanted):
        factor = float(np.vdot(found, wanted) / np.vdot(wanted, wanted))
        yield f"gradient of {name}: about {factor:.4g} times what the logits give"


def _part(
    config: RunConfig, name: str, before: Mapping, after: Mapping, applied: Mapping[str, np.ndarray]
) -> _Part | _CodedPart | _OrthogonalPart:
    if f"{FIRST}{name}" in after:
        return _Part(config, name, before, after)
    if f"{CODES[0]}.{name}" in after:
        return _CodedPart(config, name, before, after, applied[name])
    return _OrthogonalPart(config, name, before, after)


class _Part:
    """One weight with its moments before and after the step, in float64. ``kept_of_rows``: by which QK-clip multiplies rows."""

    kept_of_rows = np.ones(1)

    def __init__(self, config: RunConfig, name: str, before: Mapping, after: Mapping) -> None:
        self.optimizer = config.optimizer
        master = f"{MASTER}.{name}"
        held = master if master in after and float(before[POWERS[0]]) != 1.0 else name  # the first step makes the copy
        names = (held, f"{FIRST}{name}", f"{SECOND}{name}")
        self.old = [np.asarray(before[one], np.float64) for one in names]
        self.new = [np.asarray(after[one], np.float64) for one in names]
        self.ulp = _ulp(after[held])
        beta = self.optimizer.betas[0]
        self.gradient = (self.new[1] - beta * self.old[1]) / (1 - beta)

    def problems(self, name: str, updates: int, rate: float) -> Iterator[str]:
        beta1, beta2 = self.optimizer.betas
        second = beta2 * self.old[2] + (1 - beta2) * self.gradient**2
        if not _largest(second - self.new[2]) <= TOLERANCE * _largest(second):
            yield f"{SECOND}{name}: not the mean of squared gradients"
        left1, left2 = (1 - beta1**updates, 1 - beta2**updates) if self.optimizer.bias_correction else (1.0, 1.0)
        decay = self.optimizer.decay_of(name, self.old[0].ndim)
        root = np.sqrt(self.new[2] / left2) + self.optimizer.eps
        change = rate * (self.new[1] / left1 / root + decay * self.old[0])
        error = _beyond_rounding(_by_rows(self.old[0] - change, self.kept_of_rows), self.new[0], self.ulp)
        if not error <= TOLERANCE * _largest(change) + ROUNDING * _largest(self.old[0]):
            yield f"{name}: off by {error:.2e} from AdamW's update with a decay of {decay:g}"


class _CodedPart(_Part):
    """One weight whose moments are in codes: those of the step before are decoded, and what this one made of them is encoded."""

    def __init__(self, config: RunConfig, name: str, before: Mapping, after: Mapping, gradient: np.ndarray) -> None:
        self.optimizer, self.gradient, self.ulp = config.optimizer, gradient, _ulp(after[name])
        old, new = ([_decoded(state, name, number) for number in (0, 1)] for state in (before, after))
        self.old = [np.asarray(before[name], np.float64), *old]
        means = zip(self.optimizer.betas, old, (gradient, gradient**2), strict=True)
        moments = [beta * kept + (1 - beta) * mean for beta, kept, mean in means]
        self.new, self.found = [np.asarray(after[name], np.float64), *moments], new
        self.room = [steps_beside(*_codes(after, name, number), signed) for number, signed in enumerate(SIGNED)]

    def problems(self, name: str, updates: int, rate: float) -> Iterator[str]:
        for kind, moment, found, room in zip(CODES, self.new[1:], self.found, self.room, strict=True):
            error = np.maximum(np.abs(found - moment) - NEAREST * room, 0)
            if not _largest(error) <= TOLERANCE * _largest(moment):
                yield f"{kind}.{name}: not the codes nearest to the mean, off by {_largest(error):.2e} more"
        yield from super().problems(name, updates, rate)


def _codes(state: Mapping, name: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    return state[f"{CODES[number]}.{name}"], state[f"{SCALES[number]}.{name}"]


def _decoded(state: Mapping, name: str, number: int) -> np.ndarray:
    return decoded(*_codes(state, name, number), SIGNED[number]).astype(np.float64)


class _OrthogonalPart:
    """One matrix with its momentum, or those of all experts, updated by Muon. Singular values are mapped one by one, as
    Newton-Schulz steps do.
    """

    kept_of_rows = np.ones(1)

    def __init__(self, config: RunConfig, name: str, before: Mapping, after: Mapping) -> None:
        self.optimizer, self.ulp = config.optimizer, _ulp(after[name])
        momentum = f"{MUON_MOMENT}.{name}"
        self.old, self.new = (np.asarray(one[name], np.float64) for one in (before, after))
        self.kept, self.moment = (np.asarray(one[momentum], np.float64) for one in (before, after))
        self.gradient = self.moment - self.optimizer.momentum * self.kept

    def problems(self, name: str, updates: int, rate: float) -> Iterator[str]:
        optimizer = self.optimizer
        ahead = self.gradient + optimizer.momentum * self.moment
        left, values, right = np.linalg.svd(ahead if optimizer.nesterov else self.moment, full_matrices=False)
        values = values / (np.linalg.norm(values, axis=-1, keepdims=True) + TINY)
        for a, b, c in optimizer.newton_schulz:
            values = a * values + b * values**3 + c * values**5
        size = optimizer.matched_adamw_rms * np.sqrt(max(self.old.shape[-2:]))
        step = size * (left * values[..., np.newaxis, :]) @ right
        decay = optimizer.decay_of(name, self.old.ndim)
        change = rate * (step + decay * self.old)
        error = _beyond_rounding(_by_rows(self.old - change, self.kept_of_rows), self.new, self.ulp)
        if not error <= ORTHOGONAL_TOLERANCE * _largest(change) + ROUNDING * _largest(self.old):
            yield f"{name}: off by {error:.2e} from Muon's update with a decay of {decay:g}"


def _ulp(weight: Any) -> float:
    """Return the relative distance of neighbors in the type of a weight; 0 for float32, which has a tolerance of its own."""
    return ULPS.get(np.asarray(weight).dtype.name, 0.0)


def _beyond_rounding(expected: np.ndarray, weight: np.ndarray, ulp: float) -> float:
    """Return the largest error of a weight beyond what rounding it to its type makes."""
    return _largest(np.maximum(np.abs(expected - weight) - ulp * np.abs(weight), 0.0))


def _by_rows(weight: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array), initial=0.0))
