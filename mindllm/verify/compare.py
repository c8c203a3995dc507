"""Both sides of a step held together: losses, norms, tokens, every weight and every moment on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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
from mindllm.verify.recomputed.coded_state import in_numbers, parts_in_numbers, room_of_codes

Arrays = Mapping[str, np.ndarray]
Explained = Callable[[str], np.ndarray | None]


@dataclass(frozen=True)
class Tolerance:
    """Largest errors that are rounding. Those of tensors are relative to the largest magnitude of the whole tensor."""

    loss: float
    norm: float
    weights: float
    moments: float


TOLERANCES = {
    "float32": Tolerance(loss=1e-5, norm=2e-5, weights=2e-5, moments=1e-4),
    "bfloat16": Tolerance(loss=2e-3, norm=2e-2, weights=2e-1, moments=1e-1),
    "float16": Tolerance(loss=5e-4, norm=5e-3, weights=4e-2, moments=4e-2),
}
"""By the type of products, or of the parameters where that rounds more."""
OF_PAIRS = 4.0
"""Times the tolerance of a loss in short types: that of a pair is made of sums over the tokens of answers, not of means."""
ROUNDING = (
    1e-8  # of the largest moment of all: what zero gradients leave, as those of key biases without rotary positions
)
LOSS, FP32 = "loss", "float32"
HALVES = ("float16", "bfloat16")
SQUARES = ("adam_v", "moment2")


@dataclass(frozen=True)
class TensorError:
    """The largest error of one tensor on one rank: absolute, and relative to the tensor's largest magnitude.

    What errors of its moments explain is no part of the relative one.
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
    """One step on both sides. ``errors`` holds the worst rank of every tensor, the largest relative error first; ``further``
    describes what else differs: decays, counts, and an update that is not the one asked for on either side.
    """

    single: StepResult
    cluster: ClusterStep
    errors: tuple[TensorError, ...]
    tolerance: Tolerance
    further: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """What differs by more than rounding; empty where nothing does."""
        return [*self._scalars(), *self._tensors(), *self.further]

    def worst(self, moments: bool) -> TensorError | None:
        """The largest absolute error of all weights, or of all optimizer state."""
        return max((error for error in self.errors if error.is_moment == moments), key=_absolute, default=None)

    def _scalars(self) -> Iterable[str]:
        if set(self.cluster.overflows) != {self.single.overflow}:
            alone = f" ({self.cluster.spoiled} alone was made infinite)" if self.cluster.spoiled else ""
            overflows = list(self.cluster.overflows)
            yield f"overflow: {self.single.overflow} on a single device, {overflows} on the ranks{alone}"
        if set(self.cluster.tokens) != {self.single.tokens}:
            yield f"tokens: {self.single.tokens} on a single device, {sorted(set(self.cluster.tokens))} on the ranks"
        if self.single.overflow and not self.cluster.spoiled:
            return  # what is infinite has no loss
        compared = [(LOSS, self.single.loss, self.cluster.losses, self.tolerance.loss)]
        if not self.single.overflow:
            compared.append(("global norm", self.single.global_norm, self.cluster.norms, self.tolerance.norm))
        for name, wanted, found, tolerance in compared:
            distances = [_ordered(abs(value - wanted)) for value in found]
            worst = found[distances.index(max(distances))]
            if not max(distances) <= tolerance * abs(wanted):
                yield f"{name}: {wanted:.7g} on a single device, {worst:.7g} on the cluster"

    def _tensors(self) -> Iterable[str]:
        for error in self.errors:
            if not error.relative <= (self.tolerance.moments if error.is_moment else self.tolerance.weights):
                yield f"{error.name} on rank {error.rank}: off by {error.absolute:.2e}, {error.relative:.2e} of its largest"


def tolerance_of(config: RunConfig) -> Tolerance:
    """The largest errors of a run that are rounding."""
    model = config.model.config
    dtypes = (model.compute_dtype, model.param_init_type)
    dtype = max(dtypes, key=lambda one: TOLERANCES[one].weights)  # the one that rounds most
    found = TOLERANCES[dtype]
    return replace(found, loss=OF_PAIRS * found.loss) if config.is_preference_tuning and dtype != FP32 else found


def is_of_loss(problem: str) -> bool:
    """Whether one of the problems of a comparison is that losses differ."""
    return problem.startswith(f"{LOSS}: ")


def held_by(cluster: Cluster) -> dict[int, Mapping[str, Part]]:
    """What each rank of a cluster has of weights that are updated and of optimizer state."""
    return {machine.rank: state_parts(machine) for machine in cluster.machines}


def compare(
    single: StepResult,
    state: Mapping[str, np.ndarray],
    step: ClusterStep,
    ranks: Mapping[int, Mapping[str, Part]],
    tolerance: Tolerance,
    explained: Explained = lambda name: None,
) -> Comparison:
    """Holds a step's results together, and the state both sides have after it: ``ranks`` have what :func:`held_by` says.

    Moments in codes are compared as numbers, with room for the code beside.

    ``explained``: of a whole weight how large an error may be, element by element, beside what is allowed anyway.
    """
    worst: dict[str, TensorError] = {}
    state, room = in_numbers(state), room_of_codes(state)
    negligible = _negligible(state)
    for rank, parts in ranks.items():
        for name, part in parts_in_numbers(parts).items():
            whole = _wide(state[name])
            beside = room.get(name, explained(name))
            beside = None if beside is None else beside[part.slices]
            error = _error(name, rank, _wide(part.value), whole[part.slices], whole, beside)
            if error.absolute <= negligible.get(kind_of_state(name), 0.0):
                error = replace(error, relative=0.0)
            known = worst.get(name)
            if known is None or not error.relative <= known.relative:
                worst[name] = error
    missing = [name for name in state if name not in worst]
    unseen = [TensorError(name, -1, math.inf, math.inf) for name in missing]
    ranked = sorted([*worst.values(), *unseen], key=lambda error: -_ordered(error.relative))
    return Comparison(single, step, tuple(ranked), tolerance)


def _negligible(state: Mapping[str, np.ndarray]) -> dict[str, float]:
    """By kind of moment the absolute error that is rounding of gradients which are zero."""
    largest: dict[str, float] = {}
    for name, array in state.items():
        if is_state(name):
            largest[kind_of_state(name)] = max(
                largest.get(kind_of_state(name), 0.0), float(np.max(np.abs(array), initial=0.0))
            )
    return {kind: size * (ROUNDING**2 if kind in SQUARES else ROUNDING) for kind, size in largest.items()}


def explained_by_moments(
    optimizer: OptimizerConfig, tolerance: Tolerance, rate_of: Callable[[str], float], updates: int, state: Arrays
) -> Explained:
    """How large errors of weights may be because errors of their moments may be as large as the tolerance.

    Adam divides by the root of the second moment: where that is small, next to zero gradients that are large elsewhere, rounding
    of a gradient is a visible part of an update. ``state``: after the update, number ``updates``, counted from 1.
    """
    left1, left2 = (1 - beta**updates if optimizer.bias_correction else 1.0 for beta in optimizer.betas)

    @cache
    def explained(name: str) -> np.ndarray | None:
        first, second = (state.get(f"{prefix}{name}") for prefix in MOMENT_PREFIXES)
        if first is None or second is None or first.shape != state[name].shape:
            return None
        error = tolerance.moments * float(np.max(np.abs(first), initial=0.0)) / left1
        return rate_of(name) * error / (np.sqrt(second / left2) + optimizer.eps)

    return explained


def _wide(value: Any) -> np.ndarray:
    """Return a tensor whose values can be subtracted: float32 in place of half precision."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name in HALVES else array


def _error(
    name: str, rank: int, found: np.ndarray, wanted: np.ndarray, whole: np.ndarray, explained: np.ndarray | None
) -> TensorError:
    distance = np.abs(found - wanted)
    absolute = counted = float(np.max(distance, initial=0.0))
    if explained is not None:
        counted = float(np.max(np.maximum(distance - explained, 0.0), initial=0.0))  # a NaN stays one
    largest = float(np.max(np.abs(whole), initial=0.0))
    return TensorError(name, rank, absolute, counted / largest if largest else counted)


def _absolute(error: TensorError) -> float:
    return _ordered(error.absolute)


def _ordered(number: float) -> float:
    """NaN as the largest number."""
    return math.inf if math.isnan(number) else number
