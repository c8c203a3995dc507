"""How the loss changes along the gradients of a step: what a factor that all gradients have cannot hide from.

By a small step along the direction in which a single device's gradients point, its loss changes by their length times that
step. The loss is computed on both sides of the weights, in float64 from logits, in steps of the same compiled graph that
overflow and so change nothing. That needs no formula of a gradient, so it is asked of adapters and of pairs of answers, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindllm.architecture.adapters import MAGNITUDE, VALUES, A, B
from mindllm.architecture.optimizer_state import MOMENT_PREFIXES, updated_weights
from mindllm.config import RunConfig
from mindllm.verify.loss import mean_loss
from mindllm.verify.single import Arrays, SingleDevice, Task
from mindllm.verify.update import CLIP_EPSILON, MOVED_OTHERWISE

FIRST = MOMENT_PREFIXES[0]
CHANGE = 2e-3
"""By which the loss is to change on each side, in nats: third derivatives then leave 1e-4 of the slope, fp32 as much."""
TOLERANCE = 5e-3
"""Of the slope; forms leave up to 2e-4, of LISA 2e-3."""


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
        device: the one that has done the step; it does two more, which are skipped.
        task: the step, which did an update.
        norm: of its gradients, as the step told it.
        before: weights and optimizer state before the step, by name.
        after: the same behind it.
    """
    if config.model.config.compute_dtype != "float32" or _is_left_out(config):
        return ()
    gradients = gradients_of_loss(config, before, after)
    length = float(np.sqrt(sum(np.sum(one**2) for one in gradients.values())))
    if not length:
        return ()
    wrapper = config.runner_wrapper
    clipped = min(1.0, wrapper.max_grad_norm / (norm + CLIP_EPSILON)) if wrapper.use_clip_grad and task.clips else 1.0
    wanted = length / clipped
    found = _slope(
        config, device, task, before, {name: one / length for name, one in gradients.items()}, CHANGE / wanted
    )
    if abs(found - wanted) <= TOLERANCE * wanted:
        return ()
    return (f"gradients: about {wanted / found:.4g} times what the loss changes by along them, which is {found:.6g}",)


def gradients_of_loss(config: RunConfig, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> Arrays:
    """What first moments gained in a step, by weight, in float64.

    Left out: weights that the step did not update, moments in codes, projected or of Muon; both matrices of AdaLoRA's adapters,
    which a penalty moves beside the loss, and of DoRA's, whose gradient takes the length of rows for a constant (Liu et al.,
    2024, section 4.3).
    """
    beta, found, updated = config.optimizer.betas[0], {}, updated_weights(after)
    moved_otherwise: tuple[str, ...] = (MOVED_OTHERWISE,)
    if any(name.endswith((VALUES, MAGNITUDE)) for name in updated):
        moved_otherwise = (MOVED_OTHERWISE, A, B)
    for name in updated:
        moment = f"{FIRST}{name}"
        if name.endswith(moved_otherwise):
            continue
        if moment in after and after[moment].shape == after[name].shape:
            old, new = np.asarray(before[moment], np.float64), np.asarray(after[moment], np.float64)
            if not np.array_equal(old, new):
                found[name] = (new - beta * old) / (1 - beta)
    return found


def _slope(
    config: RunConfig,
    device: SingleDevice,
    task: Task,
    before: Mapping[str, np.ndarray],
    direction: Mapping[str, np.ndarray],
    step: float,
) -> float:
    """The central difference of the mean loss along a direction of length 1."""
    losses = []
    for side in (step, -step):
        beside = {name: (before[name] + side * one).astype(np.float32) for name, one in direction.items()}
        losses.append(mean_loss(config, task.batch, device.values_with({**before, **beside}, task)))
    return (losses[0] - losses[1]) / (2 * step)


def _is_left_out(config: RunConfig) -> bool:
    """KTO's distance from the reference depends on weights, and has no gradient by its definition. With experts some tokens
    choose others beside the weights, which leaves up to a fifth of the slope.
    """
    if config.is_preference_tuning:
        return config.preference.estimates_divergence
    return config.model.config.expert_num > 1
