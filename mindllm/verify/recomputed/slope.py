"""How the loss changes along the gradients of a step: what a factor that all gradients have cannot hide from.

By a small step along the direction in which a single device's gradients point, its loss changes by their length times that
step. The loss is computed on both sides of the weights, in float64 from logits, in steps of the same compiled graph that
overflow and so change nothing. That needs no formula of a gradient, so it is asked of adapters and of pairs of answers, too.

Beside the weights some tokens may choose other experts, and the loss jumps. A jump weighs the more, the smaller the step, and
the fewer tokens jump: where steps of two sizes give the same slope there is none.
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
from mindllm.verify.recomputed.update import CLIP_EPSILON, MOVED_OTHERWISE
from mindllm.verify.single import Arrays, SingleDevice, Task

FIRST = MOMENT_PREFIXES[0]
WIDER = 4  # than the next one is a step
CHANGES = tuple(2e-3 / WIDER**number for number in range(6))
"""By which the loss is to change on each side, in nats. Third derivatives leave 1e-4 of the slope with the first, fp32 up to 1e-3
with the last. All but the first are for experts alone.
"""
TOLERANCE, TOLERANCE_OF_ROUTERS, SAME, FLOOR = 5e-3, 3e-2, 2e-3, 1e-4
"""Of a slope: forms leave up to 2e-4 of that along all gradients, of routers up to 4e-3. What slopes of two sizes may
leave between each other, of themselves and of the slope along all gradients.
"""
ROUNDING, ROUNDING_OF_EXPERTS, SEEN, LEAST_SHARE = 1e-4, 1e-3, 3e-3, 1e-2
"""Of the slope along all gradients: what fp32 leaves of that along some, and jumps beside it; gradients of which it would show
that they are twice as large; gradients that count for less than others.
"""
LAYER, LAYERS, ROUTER = re.compile(r"\.\d+\."), "model.layers.", "feed_forward.router.weight"


def slope_problems(
    config: RunConfig,
    device: SingleDevice,
    task: Task,
    norm: float,
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
) -> tuple[str, ...]:
    """Where the loss of a step changes otherwise along its gradients than by their length; in fp32 alone.

    Args:
        config: the run on one device.
        device: the one that has done the step; it does some more, which are skipped.
        task: the step, which did an update.
        norm: of its gradients, as the step told it.
        before: weights and optimizer state before the step, by name.
        after: the same behind it.
    """
    if config.model.config.compute_dtype != "float32":
        return ()
    wrapper = config.runner_wrapper
    clipped = min(1.0, wrapper.max_grad_norm / (norm + CLIP_EPSILON)) if wrapper.use_clip_grad and task.clips else 1.0
    gradients = {name: one / clipped for name, one in gradients_of_loss(config, before, after).items() if np.any(one)}
    if not gradients:
        return ()
    along = _Along(config, device, task, before, gradients)
    with device.holding(before):
        return () if along.tells_nothing() else tuple(_problems_by_kind(along))


def _problems_by_kind(along: _Along) -> Iterator[str]:
    """The kinds of weights whose gradients have a factor that others have not; one line where all have, or none by itself."""
    slopes = {kind: along.slope_of(kind) for kind in along.kinds}
    wrong = {kind: found or 0.0 for kind, found in slopes.items() if along.is_wrong(kind, found)}
    right = [kind for kind, found in slopes.items() if found is not None and kind not in wrong]
    if wrong and any(_length(along.kinds[kind]) > SEEN * along.steepest for kind in right):
        for kind, slope in wrong.items():
            yield _told(f"gradients of {kind}", _length(along.kinds[kind]), slope, along.rounding)
        return
    of_all = along.slope(along.gradients, along.steepest)
    if of_all is not None and (wrong or not abs(of_all - along.steepest) <= TOLERANCE * along.steepest):
        yield _told("gradients", along.steepest, of_all, along.rounding)


def _told(what: str, wanted: float, found: float, least: float) -> str:
    factor = f"about {wanted / found:.4g}" if found > least else "many"
    return f"{what}: {factor} times what the loss changes by along them, which is {found:.6g}"


def _length(gradients: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(one**2) for one in gradients.values())))


def gradients_of_loss(config: RunConfig, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> Arrays:
    """What first moments gained in a step, by weight, in float64.

    Left out: weights that the step did not update, moments in codes or projected; both matrices of AdaLoRA's adapters, which a
    penalty moves beside the loss, and of DoRA's, whose gradient takes the length of rows for a constant (Liu et al., 2024,
    section 4.3).
    """
    found, updated = {}, updated_weights(after)
    moved_otherwise: tuple[str, ...] = (MOVED_OTHERWISE,)
    if any(name.endswith((VALUES, MAGNITUDE)) for name in updated):
        moved_otherwise = (MOVED_OTHERWISE, A, B)
    kinds = ((FIRST, config.optimizer.betas[0], 1 - config.optimizer.betas[0]), *_of_muon(config))
    for name in updated:
        if name.endswith(moved_otherwise):
            continue
        for prefix, kept, gained in kinds:
            moment = f"{prefix}{name}"
            if moment in after and after[moment].shape == after[name].shape:
                old, new = np.asarray(before[moment], np.float64), np.asarray(after[moment], np.float64)
                if not np.array_equal(old, new):
                    found[name] = (new - (0.0 if _begins_anew(name, before) else kept) * old) / gained
    return found


def _begins_anew(name: str, before: Mapping[str, np.ndarray]) -> bool:
    """Whether LISA clears the moments of a weight in this step: those of layers, with every interval."""
    return name.startswith(LAYERS) and STEPS_IN_INTERVAL in before and float(before[STEPS_IN_INTERVAL]) == 0.0


def _of_muon(config: RunConfig) -> tuple[tuple[str, float, float], ...]:
    """What Muon's momentum is called, what is kept of it in a step, and how much of the gradient it gains."""
    return ((f"{MUON_MOMENT}.", config.optimizer.momentum, 1.0),) if config.optimizer.type == MUON else ()


@dataclass(frozen=True)
class _Along:
    """The mean loss of a task beside the weights ``before``, which the device has; there it should have these ``gradients``."""

    config: RunConfig
    device: SingleDevice
    task: Task
    before: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]

    @cached_property
    def kinds(self) -> dict[str, Arrays]:
        """Gradients by the kind of their weight: its name without the number of a layer."""
        found: dict[str, Arrays] = {}
        for name, gradient in self.gradients.items():
            found.setdefault(LAYER.sub(".*.", name), {})[name] = gradient
        return found

    @cached_property
    def steepest(self) -> float:
        """The slope along all gradients."""
        return _length(self.gradients)

    @property
    def rounding(self) -> float:
        """What fp32 leaves of a slope, and what is left of jumps."""
        return (ROUNDING_OF_EXPERTS if self.jumps else ROUNDING) * self.steepest

    @property
    def jumps(self) -> bool:
        """Whether the loss may jump."""
        return self.config.model.config.expert_num > 1

    def alike(self) -> Arrays:
        """A direction in which the loss changes by the same for every kind of weight, less for one whose gradients are next to
        none: along all gradients, those that are small count for nothing.
        """
        found: Arrays = {}
        for own in self.kinds.values():
            length = _length(own)
            weight = min(1.0, length / (LEAST_SHARE * self.steepest)) / length**2
            found |= {name: weight * gradient for name, gradient in own.items()}
        return found

    def tells_nothing(self) -> bool:
        """Whether all slopes that are asked first are right."""
        alike = self.alike()
        return (
            self.is_right(self.gradients, self.steepest)
            and self.is_right(alike, self.wanted(alike))
            and not any(self.is_wrong(kind, self.slope_of(kind)) for kind in self.kinds if kind.endswith(ROUTER))
        )

    def is_right(self, direction: Mapping[str, np.ndarray], wanted: float) -> bool:
        """Whether the loss changes along a direction as it should, or jumps there."""
        found = self.slope(direction, wanted)
        return found is None or abs(found - wanted) <= TOLERANCE * wanted

    def slope_of(self, kind: str) -> float | None:
        """The slope along the gradients of one kind of weight."""
        return self.slope(self.kinds[kind], self.steepest)

    def is_wrong(self, kind: str, found: float | None) -> bool:
        """Whether the slope along the gradients of a kind is not their length. Of a router's, a tenth can come from what balances
        its experts, so it is asked more strictly than others that are as small.
        """
        wanted = _length(self.kinds[kind])
        strictly = TOLERANCE_OF_ROUTERS * wanted + 2 * FLOOR * self.steepest
        allowed = strictly if kind.endswith(ROUTER) else TOLERANCE * wanted + self.rounding
        return found is not None and not abs(found - wanted) <= allowed

    def wanted(self, direction: Mapping[str, np.ndarray]) -> float:
        """The slope of the loss along a direction, by its gradients."""
        return sum(float(np.vdot(self.gradients[name], one)) for name, one in direction.items()) / _length(direction)

    def slope(self, direction: Mapping[str, np.ndarray], steep: float) -> float | None:
        """The same by losses, with steps that change it as asked where the slope is so ``steep``; None where it jumps beside the
        weights, whatever the step.
        """
        length = _length(direction)
        direction = {name: one / length for name, one in direction.items()}
        if not self.jumps:
            step = CHANGES[0] / steep
            return (self.loss(direction, step) - self.loss(direction, -step)) / (2 * step)
        before: tuple[float, ...] = ()
        wider = (np.nan, np.nan)
        for change in CHANGES:
            step = change / steep
            sides = self.loss(direction, step), self.loss(direction, -step)
            found = _slopes(self.here, sides, wider, step)
            for one, other in zip(found, before, strict=False):
                if abs(one - other) <= max(SAME * abs(one), FLOOR * steep):
                    return one
            before, wider = found, sides
        return None

    def loss(self, direction: Mapping[str, np.ndarray], step: float) -> float:
        """The mean loss so far along a direction of length 1."""
        beside = {name: (self.before[name] + step * one).astype(np.float32) for name, one in direction.items()}
        values = self.device.values_with(beside, self.task)
        return mean_loss(self.config, self.task.batch, values, self.fixed)

    @cached_property
    def here(self) -> float:
        """The mean loss in between."""
        return self.loss({}, 0.0)

    @cached_property
    def fixed(self) -> np.ndarray | None:
        """KTO's distance from the reference, which has no gradient by its definition: that of the weights in between."""
        if not self.config.is_preference_tuning or not self.config.preference.estimates_divergence:
            return None
        return divergences(self.config, self.task.batch, self.device.values_with({}, self.task))


def _slopes(here: float, sides: tuple[float, float], wider: tuple[float, float], step: float) -> tuple[float, ...]:
    """Slopes of a loss that is ``here`` at a place, of its values on both ``sides`` by a step, and by :data:`WIDER` such: the
    central difference, and those of each side. A jump on one side leaves that of the other as it is.
    """
    square = WIDER**2
    one_sided = (
        (square * near - far - (square - 1) * here) / (square - WIDER) for near, far in zip(sides, wider, strict=True)
    )
    ahead, behind = (one / step for one in one_sided)
    return (sides[0] - sides[1]) / (2 * step), ahead, -behind
