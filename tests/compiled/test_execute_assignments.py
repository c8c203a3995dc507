"""Updates of optimizers, against MindSpore's own kernels on the CPU, over several steps; Lamb against its formula in float64."""

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from mindspore import ops

from mindllm.compiled.execute.assignments import ASSIGNMENTS, CHANGED, Parameter

SHAPE = (5, 3)

STATE, GRADIENT, SCALAR = 0, 1, 2
P0, P1, P2, P3 = ((STATE, index) for index in range(4))
G = (GRADIENT, 0)
S = [(SCALAR, index) for index in range(7)]
CASES = {
    "SGD": (ops.SGD(), {}, [P0, G, S[0], P1, S[1], P2], [0.1, 0.0], 3),
    "SGD with momentum": (ops.SGD(0.2, 0.1), {"dampening": 0.2, "weight_decay": 0.1}, [P0, G, S[0], P1, S[1], P2], [0.1, 0.9], 3),
    "SGD, Nesterov's": (ops.SGD(0.0, 0.0, True), {"nesterov": True}, [P0, G, S[0], P1, S[1], P2], [0.1, 0.9], 3),
    "ApplyMomentum": (ops.ApplyMomentum(), {}, [P0, P1, S[0], G, S[1]], [0.1, 0.9], 2),
    "Adam": (ops.Adam(), {}, [P0, P1, P2, *S[:6], G], [0.9, 0.999, 0.01, 0.9, 0.999, 1e-8], 3),
    "Adam, Nesterov's": (
        ops.Adam(use_nesterov=True), {"use_nesterov": True}, [P0, P1, P2, *S[:6], G], [0.81, 0.99, 0.01, 0.9, 0.999, 1e-8], 3),
    "AdamWeightDecay": (ops.AdamWeightDecay(), {}, [P0, P1, P2, *S[:5], G], [0.01, 0.9, 0.999, 1e-8, 0.1], 3),
    "ApplyAdaMax": (ops.ApplyAdaMax(), {}, [P0, P1, P2, *S[:5], G], [0.9, 0.01, 0.9, 0.999, 1e-8], 3),
    "ApplyRMSProp": (ops.ApplyRMSProp(), {}, [P0, P1, P2, S[0], G, *S[1:4]], [0.01, 0.9, 0.5, 1e-8], 3),
    "ApplyCenteredRMSProp": (ops.ApplyCenteredRMSProp(), {}, [P0, P1, P2, P3, G, *S[:4]], [0.01, 0.9, 0.5, 1e-2], 4),
    "ApplyAdagrad": (ops.ApplyAdagrad(), {}, [P0, P1, S[0], G], [0.01], 2),
    "ApplyAdagradV2": (ops.ApplyAdagradV2(epsilon=1e-3), {"epsilon": 1e-3}, [P0, P1, S[0], G], [0.01], 2),
    "ApplyFtrl": (ops.ApplyFtrl(), {}, [P0, P1, P2, G, *S[:4]], [0.1, 0.0, 0.02, -0.5], 3),
}  # fmt: skip


def _begun(operator, count, generator):
    """Weights, and state as optimizers begin it; sums of squares must not be 0."""
    state = [generator.standard_normal(SHAPE).astype(np.float32)]
    state += [np.zeros(SHAPE, np.float32) for _ in range(count - 1)]
    if operator == "SGD":
        state[2] = np.ones(SHAPE, np.float32)
    if operator in ("ApplyAdagrad", "ApplyAdagradV2", "ApplyFtrl"):
        state[1] += np.float32(0.1)
    return state


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_mindspore(name):
    primitive, attributes, order, scalars, count = CASES[name]
    operator = primitive.name
    generator = np.random.default_rng(0)
    state = _begun(operator, count, generator)
    scalars = [np.float32(value) for value in scalars]
    plain = {"ApplyFtrl": 0, "ApplyRMSProp": 1, "ApplyCenteredRMSProp": 1}.get(
        operator, len(scalars)
    )  # these take numbers
    tensors = [ms.Tensor(value) if n < plain else float(value) for n, value in enumerate(scalars)]
    theirs = [ms.Parameter(ms.Tensor(value), name=f"p{n}") for n, value in enumerate(state)]
    ours = [Parameter(f"p{n}", value.copy()) for n, value in enumerate(state)]
    for _ in range(3):
        gradient = generator.standard_normal(SHAPE).astype(np.float32)
        given = {STATE: theirs, GRADIENT: [ms.Tensor(gradient)], SCALAR: tensors}
        primitive(*(given[kind][index] for kind, index in order))
        given = {STATE: ours, GRADIENT: [gradient], SCALAR: scalars}
        ASSIGNMENTS[operator](attributes, *(given[kind][index] for kind, index in order))
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            np.testing.assert_allclose(other.value, one.asnumpy(), rtol=2e-5, atol=2e-6, err_msg=f"state {number}")
    changed = {
        n for n, (value, one) in enumerate(zip(state, ours, strict=True)) if not np.array_equal(value, one.value)
    }
    places = {order[place][1] for place in CHANGED[operator] if order[place][0] == STATE}
    assert changed <= places


def test_lamb_is_its_formula():
    """You et al., 2020, algorithm 2; MindSpore has no kernel for it on the CPU."""
    generator = np.random.default_rng(0)
    weight, first, second = generator.standard_normal(SHAPE), np.zeros(SHAPE), np.zeros(SHAPE)
    ours = [
        Parameter(name, value.astype(np.float32)) for name, value in zip("wmv", (weight, first, second), strict=True)
    ]
    rate, beta1, beta2, epsilon, decay = 0.01, 0.9, 0.999, 1e-6, 0.1
    for step in range(1, 4):
        gradient = generator.standard_normal(SHAPE)
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        direction = first / (1 - beta1**step) / (np.sqrt(second / (1 - beta2**step)) + epsilon) + decay * weight
        weight = weight - rate * np.linalg.norm(weight) / np.linalg.norm(direction) * direction
        scalars = map(np.float32, (rate, beta1, beta2, epsilon, decay))
        ASSIGNMENTS["Lamb"]({}, *ours, *scalars, np.int32(step), gradient.astype(np.float32))
        np.testing.assert_allclose(ours[0].value, weight, rtol=1e-4, atol=1e-6)


def test_momentum_ahead_is_its_formula():
    """Sutskever et al., 2013, as MindSpore documents it; its kernel on the CPU ignores ``use_nesterov``."""
    weight, velocity = Parameter("w", np.float32([1.0])), Parameter("v", np.float32([0.5]))
    ASSIGNMENTS["ApplyMomentum"](
        {"use_nesterov": True}, weight, velocity, np.float32(0.1), np.float32([2.0]), np.float32(0.9)
    )
    assert velocity.value[0] == pytest.approx(0.9 * 0.5 + 2.0)
    assert weight.value[0] == pytest.approx(1.0 - 0.1 * (2.0 + 0.9 * 2.45))


def test_ftrl_shrinks_as_its_formula():
    """McMahan et al., 2013, algorithm 1, with l1; MindSpore's kernel on the CPU adds l1 where it should take it off."""
    weight, sums, linear = (
        Parameter(name, np.float32([value])) for name, value in (("w", 1.0), ("n", 0.1), ("z", 0.0))
    )
    scalars = map(np.float32, (0.1, 0.1, 0.5, -0.5))
    ASSIGNMENTS["ApplyFtrl"]({}, weight, sums, linear, np.float32([2.0]), *scalars)
    z = 2.0 - (np.sqrt(4.1) - np.sqrt(0.1)) / 0.1
    assert linear.value[0] == pytest.approx(z)
    assert weight.value[0] == pytest.approx((np.sign(z) * 0.1 - z) / (np.sqrt(4.1) / 0.1 + 2 * 0.5))


def test_a_parameter_in_bfloat16_is_rounded_whenever_it_is_changed():
    kind = np.dtype(ml_dtypes.bfloat16)
    weight = Parameter("w", np.ones(SHAPE, np.float32), kind)
    ASSIGNMENTS["AssignAdd"]({}, weight, np.full(SHAPE, 1e-3, np.float32))
    assert np.array_equal(weight.value, np.ones(SHAPE, np.float32))  # 1.001 is 1 in eight bits
    ASSIGNMENTS["Assign"]({}, weight, np.full(SHAPE, 0.3, np.float32))
    assert np.array_equal(weight.value, np.full(SHAPE, 0.3).astype(kind).astype(np.float32))
