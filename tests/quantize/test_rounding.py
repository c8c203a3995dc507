"""Rounding to codes: to the nearest, with GPTQ and with AWQ, by their error against the matrix in floats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindllm.architecture.quantization import bits_of
from mindllm.quantize import channel_factors, code_values, output_error, quantize, quantize_clipped, quantize_gptq


def drawn(seed, out=24, width=64, tokens=96):
    """A matrix, inputs whose columns depend on each other and differ in size, and the sum of ``x xᵀ``."""
    random = np.random.default_rng(seed)
    weight = random.normal(0, 0.3, (out, width)).astype(np.float32)
    mixed = random.normal(0, 1, (tokens, width // 4)) @ random.normal(0, 1, (width // 4, width))
    inputs = (mixed + 0.3 * random.normal(0, 1, (tokens, width))) * random.lognormal(0, 1.5, width)
    return weight, inputs, inputs.T @ inputs


@pytest.mark.parametrize("code", ["uint4", "uint8", "int8", "nf4", "fp4", "e4m3"])
@pytest.mark.parametrize("group", [8, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_value_becomes_the_nearest_code(code, group, symmetric):
    weight = np.random.default_rng(0).normal(0.1, 0.3, (6, 64)).astype(np.float32)
    codes = quantize(weight, code, group, symmetric)
    table = code_values(code)
    grid = table[np.isfinite(table)]
    levels = np.broadcast_to(grid, (6, 64 // group, len(grid)))
    if codes.zeros is not None:
        levels = levels - codes.zeros[:, :, None]
    levels = np.repeat(levels * codes.scales[:, :, None], group, axis=1)
    best = np.abs(levels - weight[:, :, None]).min(-1)
    np.testing.assert_allclose(np.abs(codes.values() - weight), best, atol=1e-6)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["uint4", "uint8", "nf4"]), st.sampled_from([16, 64]), st.booleans())
def test_gptq_is_no_worse_than_the_nearest_codes(seed, code, group, act_order):
    weight, _, sums = drawn(seed)
    found = quantize_gptq(weight, sums, code, group, act_order)
    plain = quantize(weight, code, group)
    assert (found.columns is not None) == act_order
    assert output_error(weight, found.values(), sums) <= output_error(weight, plain.values(), sums)


def test_gptq_against_its_own_formula():
    """Each column by the solution of least squares for those that are left (Frantar et al., 2023, equation 2)."""
    weight, _, sums = drawn(3, out=4, width=16)
    damped = sums + 0.01 * np.mean(np.diag(sums)) * np.eye(16)
    found = quantize_gptq(weight, sums, "uint4", 16)
    left, values = weight.astype(np.float64), np.empty((4, 16))
    for column in range(16):
        code = np.clip(np.rint(left[:, column] / found.scales[:, 0]) + 8, 0, 15)
        values[:, column] = (code - 8) * found.scales[:, 0]
        inverse = np.linalg.inv(damped[column:, column:])
        error = (left[:, column] - values[:, column]) / inverse[0, 0]
        left[:, column + 1 :] -= np.outer(error, inverse[0, 1:])
    np.testing.assert_allclose(found.values(), values, atol=1e-6)


def test_columns_that_meet_nothing_become_zero():
    weight, _, sums = drawn(0)
    sums[5] = sums[:, 5] = 0.0
    assert not quantize_gptq(weight, sums, "uint4", 16).values()[:, 5].any()


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_factors_and_ranges_of_awq_are_no_worse_than_the_nearest_codes(seed):
    weight, inputs, sums = drawn(seed)
    plain = output_error(weight, quantize(weight, "uint4", 16, symmetric=False).values(), sums)
    factors = channel_factors([weight], sums, np.abs(inputs).mean(0), "uint4", 16)
    scaled = output_error(weight, quantize(weight * factors, "uint4", 16, symmetric=False).values() / factors, sums)
    assert scaled <= plain
    assert factors.max() * factors.min() == pytest.approx(1, rel=1e-3)


def test_a_range_is_shrunk_where_the_inputs_want_it():
    weight, _, _ = drawn(0, width=16)
    weight[:, 0] = 4.0  # a column that nothing large meets
    sums = np.diag([1e-3, *[1.0] * 15])
    plain = output_error(weight, quantize(weight, "uint4", 16, symmetric=False).values(), sums)
    assert output_error(weight, quantize_clipped(weight, sums, "uint4", 16).values(), sums) < 0.8 * plain
    assert bits_of("uint4") == 4
