"""By how much all that changes otherwise than on one device does: gradients that are sums where means were meant."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mindllm.programs.verify import FP32_TOLERANCE, change_factor

SHAPES = {"head.weight": (10, 28), "head.bias": (10,), "layer.weight": (32, 10)}


def _stepped(seed: int, factors: dict[str, float], rate: float) -> tuple[dict, dict]:
    """Values on a rank and on one device before and after a step in float32; the rank's gradients so many times as large."""
    generator = np.random.default_rng(seed)
    before, after = {}, {}
    for name, shape in SHAPES.items():
        value, gradient = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
        before[name] = (value, value)
        after[name] = tuple(
            (value - np.float32(rate) * np.float32(times) * gradient).astype(np.float32)
            for times in (factors[name], 1.0)
        )
    return before, after


@given(seed=st.integers(0, 1 << 16), times=st.integers(2, 64), rate=st.floats(1e-5, 1e-1))
def test_a_whole_factor_is_told_however_small_the_changes_are_beside_the_values(seed, times, rate):
    before, after = _stepped(seed, dict.fromkeys(SHAPES, times), rate)
    assert change_factor(before, after, FP32_TOLERANCE) == times


@given(seed=st.integers(0, 1 << 16), other=st.sampled_from([1.5, 3.0, -4.0]))
def test_parameters_that_do_not_agree_have_no_factor(seed, other):
    before, after = _stepped(seed, {**dict.fromkeys(SHAPES, 4.0), "head.bias": other}, 1e-2)
    assert change_factor(before, after, FP32_TOLERANCE) == 0


@given(seed=st.integers(0, 1 << 16))
def test_what_stays_as_it_is_has_no_factor(seed):
    before, after = _stepped(seed, dict.fromkeys(SHAPES, 4.0), 1e-2)
    after["head.bias"] = (after["head.bias"][0], before["head.bias"][1])  # changes on ranks alone
    assert change_factor(before, after, FP32_TOLERANCE) == 0


def test_what_is_no_number_has_no_factor_and_what_changes_alike_is_not_asked():
    before, after = _stepped(1, dict.fromkeys(SHAPES, 2.0) | {"layer.weight": 1.0}, 1e-2)
    assert change_factor(before, after, FP32_TOLERANCE) == 2
    after["layer.weight"][0][0, 0] = np.nan
    assert change_factor(before, after, FP32_TOLERANCE) == 0
