"""Recompute a single device's update in float64 from its own moments. This reveals mistakes that the ranks share.

The applied gradient follows from the first moment, ``g = (m' - β₁·m) / (1 - β₁)``. Its norm shows the clipping, and the second
moment and the weight follow from it.
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
OTHER_UPDATES = "router.bias"  # suffix of weights that no gradient changes
TOLERANCE = 1e-4
"""Error in fp32 of a norm, and relative to the largest second moment and the largest change of a weight."""
ORTHOGONAL_TOLERANCE, TINY = 1e-3, 1e-7
"""Relative to the largest change of a matrix. Newton-Schulz steps amplify rounding of small singular values hundreds of times."""
NEAREST = 0.51
"""Of the distance to the next code. Beyond it, but for rounding, another code is nearer."""
GRADIENT_TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
"""Relative to the largest element of a gradient, by compute dtype."""
ULPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Relative distance of neighboring numbers in types that round weights after, and gradients before an update."""
ROUNDING = 1e-6
"""Error of a difference of two weights, relative to the largest weight."""


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
    """Yield weights not updated by AdamW or Muon with the YAML's clipping, betas, epsilon and decays, and QK-clip.

    Args:
        config: the run. Adapters and other tuners have other updates, and are not checked.
        updates: number of updates, including this one.
        rate_of: returns the learning rate of a weight.
        norm: of the step's gradients, as the step returned it.
        before: weights and state before the step, by name.
        after: weights and state after it.
        known: gradients of some weights before clipping, computed in another way.
        clips: whether the step clips if the run does.
        applied: gradients of all weights after clipping, if moments are in codes.
        largest: largest attention logits of the step, ``[heads]`` by layer, if QK-clip uses them.
    """
    if config.model.config.pet_config is not None:
        return
    updated = set(updated_weights(after))
    names = [name for name in before if name in updated and not name.endswith(OTHER_UPDATES)]
    weights = {name: _weight_update(config, name, before, after, applied) for name in names}
    length = float(np.sqrt(sum(np.sum(weight.gradient**2) for weight in weights.values())))
    wrapper = config.runner_wrapper
    clipped = min(1.0, wrapper.max_grad_norm / (norm + CLIP_EPSILON)) if wrapper.use_clip_grad and clips else 1.0
    rounding = ULPS.get(config.model.config.param_init_type, 0.0)
    if not abs(length - norm * clipped) <= (TOLERANCE + rounding) * norm * clipped:
        yield f"gradients were applied with the norm {length:.6g}; of {norm:.6g}, clipping leaves {norm * clipped:.6g}"
    allowed = GRADIENT_TOLERANCES[config.model.config.compute_dtype] + rounding
    for name, gradient in known.items():
        if name in weights:
            yield from _gradient_problems(name, weights[name].gradient, gradient * clipped, allowed)
    row_factors = head_factors(config, largest)
    for name, weight in weights.items():
        weight.row_factors = row_factors.get(name, weight.row_factors)
        yield from weight.problems(name, updates, rate_of(name))


def head_factors(config: RunConfig, largest: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the factors of QK-clip on the rows of weights, float64 ``[rows]`` by name."""
    threshold, architecture = config.optimizer.qk_clip_threshold, config.model.config.architecture
    if threshold is None:
        return {}
    shapes, factors = architecture.trained_shapes(), {}
    for name, rows in query_key_rows(architecture).items():
        logits = np.asarray(largest[name.split(".")[2]], np.float64).reshape(rows.groups, -1).max(1)
        factor = (threshold / np.maximum(logits, threshold)) ** rows.power
        factors[name] = np.repeat(factor, shapes[name][0] // rows.groups)
    return factors


def _gradient_problems(name: str, gradient: np.ndarray, expected: np.ndarray, tolerance: float) -> Iterator[str]:
    if not _largest(gradient - expected) <= tolerance * _largest(expected):
        factor = float(np.vdot(gradient, expected) / np.vdot(expected, expected))
        yield f"gradient of {name}: about {factor:.4g} times the one from the logits"


def _weight_update(
    config: RunConfig, name: str, before: Mapping, after: Mapping, applied: Mapping[str, np.ndarray]
) -> _AdamUpdate | _CodedUpdate | _MuonUpdate:
    if f"{FIRST}{name}" in after:
        return _AdamUpdate(config, name, before, after)
    if f"{CODES[0]}.{name}" in after:
        return _CodedUpdate(config, name, before, after, applied[name])
    return _MuonUpdate(config, name, before, after)


class _AdamUpdate:
    """A weight with its moments before and after the step, in float64. ``row_factors``: of QK-clip."""

    row_factors = np.ones(1)

    def __init__(self, config: RunConfig, name: str, before: Mapping, after: Mapping) -> None:
        self.optimizer = config.optimizer
        master = f"{MASTER}.{name}"
        # the first step creates the copy in fp32
        source = master if master in after and float(before[POWERS[0]]) != 1.0 else name
        names = (source, f"{FIRST}{name}", f"{SECOND}{name}")
        self.old = [np.asarray(before[one], np.float64) for one in names]
        self.new = [np.asarray(after[one], np.float64) for one in names]
        self.ulp = _ulp(after[source])
        beta = self.optimizer.betas[0]
        self.gradient = (self.new[1] - beta * self.old[1]) / (1 - beta)

    def problems(self, name: str, updates: int, rate: float) -> Iterator[str]:
        beta1, beta2 = self.optimizer.betas
        second = beta2 * self.old[2] + (1 - beta2) * self.gradient**2
        if not _largest(second - self.new[2]) <= TOLERANCE * _largest(second):
            yield f"{SECOND}{name}: not the mean of squared gradients"
        correction1, correction2 = (
            (1 - beta1**updates, 1 - beta2**updates) if self.optimizer.bias_correction else (1.0, 1.0)
        )
        decay = self.optimizer.decay_of(name, self.old[0].ndim)
        root = np.sqrt(self.new[2] / correction2) + self.optimizer.eps
        change = rate * (self.new[1] / correction1 / root + decay * self.old[0])
        error = _beyond_rounding(_by_rows(self.old[0] - change, self.row_factors), self.new[0], self.ulp)
        if not error <= TOLERANCE * _largest(change) + ROUNDING * _largest(self.old[0]):
            yield f"{name}: off by {error:.2e} from AdamW's update with a decay of {decay:g}"


class _CodedUpdate(_AdamUpdate):
    """A weight with moments in codes. Earlier moments are decoded, and the new ones compared within a code."""

    def __init__(self, config: RunConfig, name: str, before: Mapping, after: Mapping, gradient: np.ndarray) -> None:
        self.optimizer, self.gradient, self.ulp = config.optimizer, gradient, _ulp(after[name])
        old, new = ([_decoded(state, name, number) for number in (0, 1)] for state in (before, after))
        self.old = [np.asarray(before[name], np.float64), *old]
        means = zip(self.optimizer.betas, old, (gradient, gradient**2), strict=True)
        moments = [beta * moment + (1 - beta) * value for beta, moment, value in means]
        self.new, self.decoded = [np.asarray(after[name], np.float64), *moments], new
        self.next_code = [steps_beside(*_codes(after, name, number), signed) for number, signed in enumerate(SIGNED)]

    def problems(self, name: str, updates: int, rate: float) -> Iterator[str]:
        for kind, moment, decoded_moment, next_code in zip(
            CODES, self.new[1:], self.decoded, self.next_code, strict=True
        ):
            error = np.maximum(np.abs(decoded_moment - moment) - NEAREST * next_code, 0)
            if not _largest(error) <= TOLERANCE * _largest(moment):
                yield f"{kind}.{name}: not the codes nearest to the mean, off by {_largest(error):.2e} more"
        yield from super().problems(name, updates, rate)


def _codes(state: Mapping, name: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    return state[f"{CODES[number]}.{name}"], state[f"{SCALES[number]}.{name}"]


def _decoded(state: Mapping, name: str, number: int) -> np.ndarray:
    return decoded(*_codes(state, name, number), SIGNED[number]).astype(np.float64)


class _MuonUpdate:
    """A matrix with its momentum, or those of all experts, updated by Muon.

    Newton-Schulz steps are computed on singular values.
    """

    row_factors = np.ones(1)

    def __init__(self, config: RunConfig, name: str, before: Mapping, after: Mapping) -> None:
        self.optimizer, self.ulp = config.optimizer, _ulp(after[name])
        momentum = f"{MUON_MOMENT}.{name}"
        self.old, self.new = (np.asarray(one[name], np.float64) for one in (before, after))
        old_moment, self.moment = (np.asarray(one[momentum], np.float64) for one in (before, after))
        self.gradient = self.moment - self.optimizer.momentum * old_moment

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
        error = _beyond_rounding(_by_rows(self.old - change, self.row_factors), self.new, self.ulp)
        if not error <= ORTHOGONAL_TOLERANCE * _largest(change) + ROUNDING * _largest(self.old):
            yield f"{name}: off by {error:.2e} from Muon's update with a decay of {decay:g}"


def _ulp(weight: Any) -> float:
    """Return the relative distance of neighbors in the type of a weight; 0 for float32, which has a tolerance of its own."""
    return ULPS.get(np.asarray(weight).dtype.name, 0.0)


def _beyond_rounding(expected: np.ndarray, weight: np.ndarray, ulp: float) -> float:
    """Return the largest error of a weight beyond rounding to its type."""
    return _largest(np.maximum(np.abs(expected - weight) - ulp * np.abs(weight), 0.0))


def _by_rows(weight: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array), initial=0.0))
