"""Compare the change of the loss along the gradients of a step with their length. This reveals a factor of all gradients.

By a small step along the direction of a single device's gradients, its loss changes by their length times that step. The loss
is computed on both sides of the weights, in float64 from logits, in overflowing steps of the same compiled graph, which change
nothing. This needs no formula of a gradient, and so covers adapters and preference pairs too.

Next to the weights some tokens may choose other experts, and the loss jumps. A jump weighs more in smaller steps, and less if
few tokens choose differently. If steps of two sizes give the same slope, there is no jump.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindllm.architecture.adapters import MAGNITUDE, VALUES, A, B
from mindllm.architecture.optimizer_state import MOMENT_PREFIXES, MUON, MUON_MOMENT, STEPS_IN_INTERVAL, updated_weights
from mindllm.config import RunConfig
from mindllm.verify.recomputed.loss import divergences, mean_loss
from mindllm.verify.recomputed.update import CLIP_EPSILON, OTHER_UPDATES
from mindllm.verify.single import Arrays, SingleDevice, Task

FIRST = MOMENT_PREFIXES[0]
STEP_RATIO = 4  # of a step to the next, smaller one
CHANGES = tuple(2e-3 / STEP_RATIO**number for number in range(6))
"""Intended changes of the loss on each side, in nats. The first has an error of 1e-4 of the slope by third derivatives, the last
one of up to 1e-3 by fp32. Only experts use more than the first.
"""
TOLERANCE, ROUTER_TOLERANCE = 5e-3, 3e-2
"""Of a slope. Correct forms have errors of up to 2e-4 along all gradients, and up to 4e-3 along those of routers."""
SIZE_TOLERANCE, FLOOR = 2e-3, 1e-4
"""Difference of slopes by two sizes: relative to the slope, and to that along all gradients."""
ROUNDING, ROUNDING_WITH_JUMPS = 1e-4, 1e-3
"""Errors of a slope by fp32 without and with jumps, relative to the slope along all gradients."""
VISIBLE, SMALL = 3e-3, 1e-2
"""Lengths of gradients relative to all: those whose doubling is visible, and those that count less in a balanced direction."""
LAYER, LAYERS, ROUTER = re.compile(r"\.\d+\."), "model.layers.", "feed_forward.router.weight"


def slope_problems(
    config: RunConfig,
    device: SingleDevice,
    task: Task,
    norm: float,
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
) -> tuple[str, ...]:
    """Return where the loss of a step does not change by the length of its gradients. Only fp32 is checked.

    Args:
        config: the run on one device.
        device: after the step. It runs more steps, which are skipped.
        task: the step, which updated weights.
        norm: of its gradients, as the step returned it.
        before: weights and optimizer state before the step, by name.
        after: weights and optimizer state after it.
    """
    if config.model.config.compute_dtype != "float32":
        return ()
    wrapper = config.runner_wrapper
    clipped = min(1.0, wrapper.max_grad_norm / (norm + CLIP_EPSILON)) if wrapper.use_clip_grad and task.clips else 1.0
    gradients = {name: one / clipped for name, one in gradients_of_loss(config, before, after).items() if np.any(one)}
    if not gradients:
        return ()
    line = _LossAlong(config, device, task, before, gradients)
    with device.with_state(before):
        return () if line.is_as_expected() else tuple(_problems_by_kind(line))


def _problems_by_kind(line: _LossAlong) -> Iterator[str]:
    """Yield the kinds of weights whose gradients have another factor than others; one line if all have, or no kind alone has."""
    slopes = {kind: line.kind_slope(kind) for kind in line.kinds}
    wrong = {kind: slope or 0.0 for kind, slope in slopes.items() if line.is_wrong(kind, slope)}
    right = [kind for kind, slope in slopes.items() if slope is not None and kind not in wrong]
    if wrong and any(_length(line.kinds[kind]) > VISIBLE * line.steepest for kind in right):
        for kind, slope in wrong.items():
            yield _describe(f"gradients of {kind}", _length(line.kinds[kind]), slope, line.rounding)
        return
    slope_of_all = line.slope(line.gradients, line.steepest)
    if slope_of_all is not None and (wrong or not abs(slope_of_all - line.steepest) <= TOLERANCE * line.steepest):
        yield _describe("gradients", line.steepest, slope_of_all, line.rounding)


def _describe(what: str, length: float, slope: float, rounding: float) -> str:
    factor = f"about {length / slope:.4g}" if slope > rounding else "many"
    return f"{what}: {factor} times the change of the loss along them, which is {slope:.6g}"


def _length(gradients: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(one**2) for one in gradients.values())))


def gradients_of_loss(config: RunConfig, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> Arrays:
    """Return the gradients in the first moments of a step, by weight, in float64.

    Left out are weights that the step did not update, and moments in codes or projected. So are both matrices of AdaLoRA's
    adapters, which a penalty moves too, and of DoRA's, whose gradient treats the length of rows as a constant (Liu et al.,
    2024, section 4.3).
    """
    gradients, updated = {}, updated_weights(after)
    left_out: tuple[str, ...] = (OTHER_UPDATES,)
    if any(name.endswith((VALUES, MAGNITUDE)) for name in updated):
        left_out = (OTHER_UPDATES, A, B)
    optimizer = config.optimizer
    # name of the moment, share that stays of it, share of the gradient that is added
    moments = [(FIRST, optimizer.betas[0], 1 - optimizer.betas[0])]
    if optimizer.type == MUON:
        moments.append((f"{MUON_MOMENT}.", optimizer.momentum, 1.0))
    for name in updated:
        if name.endswith(left_out):
            continue
        for prefix, stays, added in moments:
            moment = f"{prefix}{name}"
            if moment in after and after[moment].shape == after[name].shape:
                old, new = np.asarray(before[moment], np.float64), np.asarray(after[moment], np.float64)
                if not np.array_equal(old, new):
                    gradients[name] = (new - (0.0 if _is_cleared(name, before) else stays) * old) / added
    return gradients


def _is_cleared(name: str, before: Mapping[str, np.ndarray]) -> bool:
    """Return True if LISA clears the moments of a weight in this step: those of layers, in every interval."""
    return name.startswith(LAYERS) and STEPS_IN_INTERVAL in before and float(before[STEPS_IN_INTERVAL]) == 0.0


@dataclass(frozen=True)
class _LossAlong:
    """The mean loss of a task along lines through the weights ``before``, where the device has these ``gradients``."""

    config: RunConfig
    device: SingleDevice
    task: Task
    before: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]

    @cached_property
    def kinds(self) -> dict[str, Arrays]:
        """Gradients by the kind of their weight: its name without the number of a layer."""
        kinds: dict[str, Arrays] = {}
        for name, gradient in self.gradients.items():
            kinds.setdefault(LAYER.sub(".*.", name), {})[name] = gradient
        return kinds

    @cached_property
    def steepest(self) -> float:
        """The expected slope along all gradients: their length."""
        return _length(self.gradients)

    @property
    def rounding(self) -> float:
        """Error of a slope by fp32 and by jumps."""
        return (ROUNDING_WITH_JUMPS if self.jumps else ROUNDING) * self.steepest

    @property
    def jumps(self) -> bool:
        """Return True if the loss may jump."""
        return self.config.model.config.expert_num > 1

    def balanced_direction(self) -> Arrays:
        """Return a direction in which every kind of weight changes the loss equally, kinds with tiny gradients less.

        Along all gradients, small ones count for nothing.
        """
        direction: Arrays = {}
        for gradients in self.kinds.values():
            length = _length(gradients)
            weight = min(1.0, length / (SMALL * self.steepest)) / length**2
            direction |= {name: weight * gradient for name, gradient in gradients.items()}
        return direction

    def is_as_expected(self) -> bool:
        """Return True if the slopes along all gradients, in the balanced direction and along routers are right."""
        balanced = self.balanced_direction()
        return (
            self._is_right(self.gradients, self.steepest)
            and self._is_right(balanced, self.expected_slope(balanced))
            and not any(self.is_wrong(kind, self.kind_slope(kind)) for kind in self.kinds if kind.endswith(ROUTER))
        )

    def _is_right(self, direction: Mapping[str, np.ndarray], expected: float) -> bool:
        slope = self.slope(direction, expected)
        return slope is None or abs(slope - expected) <= TOLERANCE * expected

    def kind_slope(self, kind: str) -> float | None:
        """Return the slope along the gradients of one kind of weight."""
        return self.slope(self.kinds[kind], self.steepest)

    def is_wrong(self, kind: str, slope: float | None) -> bool:
        """Return True if the slope along the gradients of a kind is not their length.

        A tenth of a router's gradient can come from the balance of its experts, so its tolerance is smaller than that of other
        small gradients.
        """
        length = _length(self.kinds[kind])
        if kind.endswith(ROUTER):
            allowed = ROUTER_TOLERANCE * length + 2 * FLOOR * self.steepest
        else:
            allowed = TOLERANCE * length + self.rounding
        return slope is not None and not abs(slope - length) <= allowed

    def expected_slope(self, direction: Mapping[str, np.ndarray]) -> float:
        """Return the slope of the loss along a direction by the gradients."""
        return sum(float(np.vdot(self.gradients[name], one)) for name, one in direction.items()) / _length(direction)

    def slope(self, direction: Mapping[str, np.ndarray], steepness: float) -> float | None:
        """Return the slope of the loss along a direction by losses; None if it jumps in steps of every size.

        Args:
            direction: of any length.
            steepness: expected slope, from which the size of a step follows.
        """
        length = _length(direction)
        direction = {name: one / length for name, one in direction.items()}
        if not self.jumps:
            step = CHANGES[0] / steepness
            return (self.loss(direction, step) - self.loss(direction, -step)) / (2 * step)
        earlier: tuple[float, ...] = ()
        wider = (np.nan, np.nan)
        for change in CHANGES:
            step = change / steepness
            sides = self.loss(direction, step), self.loss(direction, -step)
            slopes = _slopes(self.loss_here, sides, wider, step)
            for slope, other in zip(slopes, earlier, strict=False):
                if abs(slope - other) <= max(SIZE_TOLERANCE * abs(slope), FLOOR * steepness):
                    return slope
            earlier, wider = slopes, sides
        return None

    def loss(self, direction: Mapping[str, np.ndarray], step: float) -> float:
        """Return the mean loss after a step along a direction of length 1."""
        weights = {name: (self.before[name] + step * one).astype(np.float32) for name, one in direction.items()}
        values = self.device.values_with(weights, self.task)
        return mean_loss(self.config, self.task.batch, values, self.fixed)

    @cached_property
    def loss_here(self) -> float:
        """The mean loss at the weights themselves."""
        return self.loss({}, 0.0)

    @cached_property
    def fixed(self) -> np.ndarray | None:
        """KTO's divergence from the reference at the weights themselves. By definition it has no gradient."""
        if not self.config.is_preference_tuning or not self.config.preference.estimates_divergence:
            return None
        return divergences(self.config, self.task.batch, self.device.values_with({}, self.task))


def _slopes(here: float, sides: tuple[float, float], wider: tuple[float, float], step: float) -> tuple[float, ...]:
    """Return the slopes at a point: the central difference, and the difference of each side. A jump spoils one side only.

    Args:
        here: loss at the point.
        sides: losses a step before and after it.
        wider: losses :data:`STEP_RATIO` steps before and after it.
        step: length of a step.
    """
    square = STEP_RATIO**2
    after, before = (
        (square * near - far - (square - 1) * here) / (square - STEP_RATIO) / step
        for near, far in zip(sides, wider, strict=True)
    )
    return (sides[0] - sides[1]) / (2 * step), after, -before
