"""Operators that change parameters: assignments, and the updates of MindSpore's optimizers.

Formulas are those of MindSpore's documentation; each update that its CPU back end has a kernel for is compared with it in the
tests. Moments are added to parameters as they stand, so operands are parameters where the operator changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Value = Any
Attributes = Mapping[str, Any]
Assignment = Callable[..., Value]
"""Given the attributes of the operator and its operands; returns its values."""
CHANGES_STATE = "side_effect_mem"
"""The attribute by which MindSpore marks an operator that changes what it is given."""


@dataclass
class Parameter:
    """A parameter of a rank. Its array is replaced, never changed, so whoever loaded it keeps what it was.

    ``holds``: the type of its values where numpy computes with them in a wider one; None: that of the array.
    """

    name: str
    value: np.ndarray
    holds: np.dtype | None = None


def loaded(value: Value) -> Value:
    """Return the array of a parameter, also inside tuples."""
    if isinstance(value, Parameter):
        return value.value
    return tuple(map(loaded, value)) if isinstance(value, tuple) else value


def _put(parameter: Parameter, value: Value) -> np.ndarray:
    if not isinstance(parameter, Parameter):  # MindSpore's own step cell clears a gradient that nobody reads again
        return np.asarray(loaded(value))
    new = np.asarray(loaded(value), parameter.value.dtype)
    if parameter.holds is not None:
        new = new.astype(parameter.holds).astype(new.dtype)
    parameter.value = new.reshape(parameter.value.shape) if new.size == parameter.value.size else new
    return parameter.value


def _assign(_: Attributes, parameter: Parameter, value: Value, *__: Any) -> np.ndarray:
    return _put(parameter, value)


def _assign_add(_: Attributes, parameter: Parameter, value: Value, *__: Any) -> np.ndarray:
    return _put(parameter, parameter.value + loaded(value))


def _assign_sub(_: Attributes, parameter: Parameter, value: Value, *__: Any) -> np.ndarray:
    return _put(parameter, parameter.value - loaded(value))


def _averaged(moment: Parameter, beta: Value, new: Value) -> np.ndarray:
    return _put(moment, moment.value * beta + new * (1 - beta))


def _adam_weight_decay(_: Attributes, weight: Parameter, moment1: Parameter, moment2: Parameter, *rest: Value) -> Value:
    """Adam with decoupled weight decay, without bias correction (``AdamWeightDecay``)."""
    rate, beta1, beta2, epsilon, decay, gradient = map(loaded, rest[:6])
    first = _averaged(moment1, beta1, gradient)
    second = _averaged(moment2, beta2, gradient * gradient)
    change = rate * (first / (np.sqrt(second) + epsilon) + decay * weight.value)
    return _put(weight, weight.value - change), first, second


def _adam(how: Attributes, weight: Parameter, moment1: Parameter, moment2: Parameter, *rest: Value) -> Value:
    """Adam with bias correction by the powers of both decay rates (Kingma & Ba, 2015); Nesterov's where it is asked for."""
    power1, power2, rate, beta1, beta2, epsilon, gradient = map(loaded, rest[:7])
    first = _averaged(moment1, beta1, gradient)
    second = _averaged(moment2, beta2, gradient * gradient)
    direction = first * beta1 + gradient * (1 - beta1) if how.get("use_nesterov") else first
    scale = rate * np.sqrt(1 - power2) / (1 - power1)
    return _put(weight, weight.value - scale * direction / (np.sqrt(second) + epsilon)), first, second


def _ada_max(_: Attributes, weight: Parameter, moment1: Parameter, norm: Parameter, *rest: Value) -> Value:
    """AdaMax (Kingma & Ba, 2015): the largest gradient in the second moment's place."""
    power, rate, beta1, beta2, epsilon, gradient = map(loaded, rest[:6])
    first = _averaged(moment1, beta1, gradient)
    largest = _put(norm, np.maximum(beta2 * norm.value, np.abs(gradient)))
    return _put(weight, weight.value - rate / (1 - power) * first / (largest + epsilon)), first, largest


def _lamb(_: Attributes, weight: Parameter, moment1: Parameter, moment2: Parameter, *rest: Value) -> np.ndarray:
    """LAMB (You et al., 2020): Adam's direction times the norm of the weight over the norm of the direction.

    Norms are those of the part that the rank is given, as MindSpore's kernel has them.
    """
    rate, beta1, beta2, epsilon, decay, step, gradient = map(loaded, rest[:7])
    first, second = _averaged(moment1, beta1, gradient), _averaged(moment2, beta2, gradient * gradient)
    corrected1, corrected2 = (m / (1 - b ** np.float32(step)) for m, b in ((first, beta1), (second, beta2)))
    direction = corrected1 / (np.sqrt(corrected2) + epsilon) + decay * weight.value
    of_weight, of_direction = np.linalg.norm(weight.value), np.linalg.norm(direction)
    ratio = of_weight / of_direction if of_weight > 0 and of_direction > 0 else np.float32(1)
    return _put(weight, weight.value - rate * ratio * direction)


def _momentum(how: Attributes, weight: Parameter, velocity: Parameter, *rest: Value) -> np.ndarray:
    """``ApplyMomentum``: the velocity is ``momentum · velocity + gradient``; Nesterov's looks one step ahead."""
    rate, gradient, momentum = map(loaded, rest[:3])
    gradient = gradient * np.float32(how.get("gradient_scale", 1.0))
    found = _put(velocity, velocity.value * momentum + gradient)
    return _put(weight, weight.value - rate * (gradient + momentum * found if how.get("use_nesterov") else found))


def _sgd(how: Attributes, weight: Parameter, gradient: Value, rate: Value, *rest: Value) -> np.ndarray:
    """``SGD``: ``stat`` is above 0 as long as the velocity has no value, which then is the gradient itself, undamped."""
    velocity, momentum, stat = rest[:3]
    change = loaded(gradient) + np.float32(how.get("weight_decay", 0.0)) * weight.value
    factor = loaded(momentum)
    if np.all(factor > 0):
        damped = (1 - np.float32(how.get("dampening", 0.0))) * change
        found = _put(velocity, np.where(loaded(stat) > 0, change, velocity.value * factor + damped))
        _put(stat, np.zeros_like(loaded(stat)))
        change = change + factor * found if how.get("nesterov") else found
    return _put(weight, weight.value - loaded(rate) * change)


def _rms_prop(_: Attributes, weight: Parameter, square: Parameter, moment: Parameter, *rest: Value) -> np.ndarray:
    """``ApplyRMSProp`` (Tieleman & Hinton, 2012)."""
    rate, gradient, rho, momentum, epsilon = map(loaded, rest[:5])
    found = _averaged(square, rho, gradient * gradient)
    change = _put(moment, momentum * moment.value + rate * gradient / np.sqrt(found + epsilon))
    return _put(weight, weight.value - change)


def _centred_rms_prop(_: Attributes, weight: Parameter, mean: Parameter, square: Parameter, *rest: Value) -> np.ndarray:
    """``ApplyCenteredRMSProp``: by the variance of gradients (Graves, 2013)."""
    moment, (gradient, rate, rho, momentum, epsilon) = rest[0], map(loaded, rest[1:6])
    found, average = _averaged(square, rho, gradient * gradient), _averaged(mean, rho, gradient)
    change = momentum * moment.value + rate * gradient / np.sqrt(found - np.square(average) + epsilon)
    return _put(weight, weight.value - _put(moment, change))


def _adagrad(how: Attributes, weight: Parameter, sums: Parameter, *rest: Value) -> Value:
    """``ApplyAdagrad`` (Duchi et al., 2011); V2 adds ``epsilon`` to the root."""
    rate, gradient = map(loaded, rest[:2])
    found = _put(sums, sums.value + gradient * gradient) if how.get("update_slots", True) else sums.value
    root = np.sqrt(found) + np.float32(how.get("epsilon", 0.0))
    return _put(weight, weight.value - rate * gradient / root), found


def _ftrl(_: Attributes, weight: Parameter, sums: Parameter, linear: Parameter, *rest: Value) -> np.ndarray:
    """``ApplyFtrl`` (McMahan et al., 2013)."""
    gradient, rate, l1, l2, power = map(loaded, rest[:5])
    new = sums.value + gradient * gradient
    sigma = (new**-power - sums.value**-power) / rate
    found = _put(linear, linear.value + gradient - sigma * weight.value)
    _put(sums, new)
    shrunk = (np.sign(found) * l1 - found) / (new**-power / rate + 2 * l2)
    return _put(weight, np.where(np.abs(found) > l1, shrunk, np.zeros_like(found)))


ASSIGNMENTS: dict[str, Assignment] = {
    "Assign": _assign,
    "AssignAdd": _assign_add,
    "AssignSub": _assign_sub,
    "AdamWeightDecay": _adam_weight_decay,
    "Adam": _adam,
    "ApplyAdaMax": _ada_max,
    "Lamb": _lamb,
    "ApplyMomentum": _momentum,
    "SGD": _sgd,
    "ApplyRMSProp": _rms_prop,
    "ApplyCenteredRMSProp": _centred_rms_prop,
    **dict.fromkeys(("ApplyAdagrad", "ApplyAdagradV2"), _adagrad),
    "ApplyFtrl": _ftrl,
}
"""By MindSpore's name of the operator."""
CHANGED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("AdamWeightDecay", "Adam", "ApplyAdaMax", "Lamb", "ApplyRMSProp", "ApplyFtrl"), (0, 1, 2)),
    **dict.fromkeys(("ApplyMomentum", "ApplyAdagrad", "ApplyAdagradV2"), (0, 1)),
    "SGD": (0, 3, 5),
    "ApplyCenteredRMSProp": (0, 1, 2, 3),
}
"""The operands that an update changes, the first of them the weight; other assignments change their first."""
