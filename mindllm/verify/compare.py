"""Compare a training step of the ranks with the same step of a single device.

Losses, norms and token counts are compared, and every weight and moment of every rank with its part of the whole tensor.
:func:`tensor_errors` is the comparison of tensors; :mod:`mindllm.programs` uses it for other people's programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import MOMENT_PREFIXES, is_state, kind_of_state
from mindllm.compiled.execute.cluster import Cluster, ClusterStep
from mindllm.compiled.execute.state import state_parts
from mindllm.config import OptimizerConfig, RunConfig
from mindllm.train.checkpoint.parts import Part
from mindllm.train.engine import StepResult

Arrays = Mapping[str, np.ndarray]
RankParts = Mapping[int, Mapping[str, Part]]
AllowedErrors = Callable[[str], np.ndarray | None]


@dataclass(frozen=True)
class Tolerance:
    """Largest errors that are due to rounding. Those of tensors are relative to the largest element of the whole tensor."""

    loss: float
    norm: float
    weights: float
    moments: float


TOLERANCES = {
    "float32": Tolerance(loss=1e-5, norm=2e-5, weights=2e-5, moments=1e-4),
    "bfloat16": Tolerance(loss=2e-3, norm=2e-2, weights=2e-1, moments=1e-1),
    "float16": Tolerance(loss=5e-4, norm=5e-3, weights=4e-2, moments=4e-2),
}
"""By the dtype of products or parameters, whichever rounds more."""
PREFERENCE_FACTOR = 4.0
"""Factor on the tolerance of a preference loss in half precision, which is made of sums over tokens instead of means."""
ROUNDING = 1e-8
"""Of the largest moment of a kind: moments of zero gradients, such as those of key biases without rotary positions."""
LOSS, FP32 = "loss", "float32"
HALVES = ("float16", "bfloat16")
SQUARES = ("adam_v", "moment2")


@dataclass(frozen=True)
class TensorError:
    """Largest error of a tensor on a rank: absolute, and relative to the largest element of the whole tensor.

    The relative error leaves out what rounding of the moments explains.
    """

    name: str
    rank: int
    absolute: float
    relative: float

    @property
    def is_moment(self) -> bool:
        return is_state(self.name)


@dataclass(frozen=True)
class Comparison:
    """A step on both sides.

    Attributes:
        single: result on the single device.
        cluster: results on the ranks.
        errors: the worst rank of every tensor, the largest relative error first.
        tolerance: of the comparison.
        further: other differences, such as decays, counts, and updates that do not follow the YAML on either side.
    """

    single: StepResult
    cluster: ClusterStep
    errors: tuple[TensorError, ...]
    tolerance: Tolerance
    further: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Return the differences that exceed rounding."""
        return [*self._scalar_problems(), *(self._describe(error) for error in self.wrong_tensors()), *self.further]

    def wrong_tensors(self) -> Iterator[TensorError]:
        """Yield the errors that exceed the tolerance; NaN does."""
        for error in self.errors:
            if not error.relative <= (self.tolerance.moments if error.is_moment else self.tolerance.weights):
                yield error

    def worst(self, moments: bool) -> TensorError | None:
        """Return the largest absolute error of all weights, or of all optimizer state."""
        errors = (error for error in self.errors if error.is_moment == moments)
        return max(errors, key=lambda error: _nan_last(error.absolute), default=None)

    @staticmethod
    def _describe(error: TensorError) -> str:
        return f"{error.name} on rank {error.rank}: off by {error.absolute:.2e}, {error.relative:.2e} of its largest"

    def _scalar_problems(self) -> Iterator[str]:
        single, cluster = self.single, self.cluster
        if set(cluster.overflows) != {single.overflow}:
            cause = f" ({cluster.spoiled} alone was made infinite)" if cluster.spoiled else ""
            yield f"overflow: {single.overflow} on a single device, {list(cluster.overflows)} on the ranks{cause}"
        if set(cluster.tokens) != {single.tokens}:
            yield f"tokens: {single.tokens} on a single device, {sorted(set(cluster.tokens))} on the ranks"
        if single.overflow and not cluster.spoiled:
            return  # the loss is infinite
        scalars = [(LOSS, single.loss, cluster.losses, self.tolerance.loss)]
        if not single.overflow:
            scalars.append(("global norm", single.global_norm, cluster.norms, self.tolerance.norm))
        for name, expected, values, tolerance in scalars:
            distances = [_nan_last(abs(value - expected)) for value in values]
            worst = values[distances.index(max(distances))]
            if not max(distances) <= tolerance * abs(expected):
                yield f"{name}: {expected:.7g} on a single device, {worst:.7g} on the cluster"


def tolerance_for(config: RunConfig) -> Tolerance:
    """Return the largest errors of a run that are due to rounding."""
    model = config.model.config
    dtype = max((model.compute_dtype, model.param_init_type), key=lambda name: TOLERANCES[name].weights)
    tolerance = TOLERANCES[dtype]
    if config.is_preference_tuning and dtype != FP32:
        return replace(tolerance, loss=PREFERENCE_FACTOR * tolerance.loss)
    return tolerance


def is_loss_problem(problem: str) -> bool:
    """Return True if a problem of a comparison is that losses differ."""
    return problem.startswith(f"{LOSS}: ")


def cluster_parts(cluster: Cluster) -> dict[int, Mapping[str, Part]]:
    """Return each rank's parts of updated weights and optimizer state."""
    return {machine.rank: state_parts(machine) for machine in cluster.machines}


def compare(
    single: StepResult,
    state: Arrays,
    step: ClusterStep,
    ranks: RankParts,
    tolerance: Tolerance,
    allowed: AllowedErrors = lambda name: None,
) -> Comparison:
    """Compare the results of a step, and the state of both sides after it. Moments in codes are compared as numbers.

    Args:
        single: result on the single device.
        state: its weights and optimizer state after the step.
        step: results on the ranks.
        ranks: their parts, from :func:`cluster_parts`.
        tolerance: of the comparison.
        allowed: returns, for a whole weight, the error of each element that does not count.
    """
    from mindllm.verify.recomputed.coded_state import decode_parts, decode_state, distances_to_next_code

    next_code, state = distances_to_next_code(state), decode_state(state)
    negligible = _negligible_errors(state)
    worst: dict[str, TensorError] = {}
    decoded = {rank: decode_parts(parts) for rank, parts in ranks.items()}
    for error in tensor_errors(state, decoded, lambda name: next_code.get(name, allowed(name))):
        if error.absolute <= negligible.get(kind_of_state(error.name), 0.0):
            error = replace(error, relative=0.0)
        if error.name not in worst or not error.relative <= worst[error.name].relative:
            worst[error.name] = error
    missing = [TensorError(name, -1, math.inf, math.inf) for name in state if name not in worst]
    ranked = sorted([*worst.values(), *missing], key=lambda error: -_nan_last(error.relative))
    return Comparison(single, step, tuple(ranked), tolerance)


def tensor_errors(
    state: Arrays,
    ranks: RankParts,
    allowed: AllowedErrors = lambda name: None,
    zero_scale: float = 1.0,
    equal_nan: bool = False,
) -> Iterator[TensorError]:
    """Yield the error of every part of every rank against the same part of a whole tensor.

    Args:
        state: whole tensors by name.
        ranks: parts of these tensors by rank.
        allowed: returns, for a whole tensor, the error of each element that does not count; None: all errors count.
        zero_scale: largest element to assume for a tensor of zeros.
        equal_nan: NaN equals NaN, and differs infinitely from a number; else every NaN is a NaN error.
    """
    for rank, parts in ranks.items():
        for name, part in parts.items():
            whole, value = _as_float32(state[name]), _as_float32(part.value)
            distance = np.abs(value - whole[part.slices])
            if equal_nan:
                both = np.isnan(value) & np.isnan(whole[part.slices])
                distance = np.where(both, 0.0, np.where(np.isnan(distance), np.inf, distance))
                whole = np.where(np.isnan(whole), 0.0, whole)
            absolute = counted = float(np.max(distance, initial=0.0))
            if (not_counted := allowed(name)) is not None:
                # np.maximum keeps NaN
                counted = float(np.max(np.maximum(distance - not_counted[part.slices], 0.0), initial=0.0))
            largest = float(np.max(np.abs(whole), initial=0.0))
            relative = counted / (largest or zero_scale) if math.isfinite(counted) else counted
            yield TensorError(name, rank, absolute, relative)


def _as_float32(value: Any) -> np.ndarray:
    """Return a tensor that supports subtraction: float32 instead of half precision."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name in HALVES else array


def _negligible_errors(state: Arrays) -> dict[str, float]:
    """Return, by kind of moment, the absolute error that is due to rounding of zero gradients."""
    largest: dict[str, float] = {}
    for name, array in state.items():
        if is_state(name):
            kind = kind_of_state(name)
            largest[kind] = max(largest.get(kind, 0.0), float(np.max(np.abs(array), initial=0.0)))
    return {kind: size * (ROUNDING**2 if kind in SQUARES else ROUNDING) for kind, size in largest.items()}


def errors_from_moments(
    optimizer: OptimizerConfig, tolerance: Tolerance, rate_of: Callable[[str], float], updates: int, state: Arrays
) -> AllowedErrors:
    """Return a function for the errors of weights that follow from errors of moments within the tolerance.

    Adam divides by the root of the second moment. Where it is small, next to zero gradients of a tensor with large ones,
    rounding of a gradient is a visible part of an update.

    Args:
        optimizer: of the run.
        tolerance: of the comparison.
        rate_of: returns the learning rate of a weight.
        updates: number of updates, including this one.
        state: after the update.
    """
    correction1, correction2 = (1 - beta**updates if optimizer.bias_correction else 1.0 for beta in optimizer.betas)

    @cache
    def allowed(name: str) -> np.ndarray | None:
        first, second = (state.get(f"{prefix}{name}") for prefix in MOMENT_PREFIXES)
        if first is None or second is None or first.shape != state[name].shape:
            return None
        error = tolerance.moments * float(np.max(np.abs(first), initial=0.0)) / correction1
        return rate_of(name) * error / (np.sqrt(second / correction2) + optimizer.eps)

    return allowed


def _nan_last(number: float) -> float:
    """Return a key that sorts NaN as the largest number."""
    return math.inf if math.isnan(number) else number
