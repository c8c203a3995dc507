"""Codes as ``WeightQuantBatchMatmul`` takes them: multiplied as it is documented, they are the matrix they were made of."""

from dataclasses import replace

import numpy as np
import pytest
from weight_quant_matmul import documented_matrix

from mindllm.architecture.quantization import CodeSpec, bits_of
from mindllm.quantize import Codes, fits_integers, to_integers

OUT, WIDTH = 48, 128
SPEC = CodeSpec("attention.wq", OUT, WIDTH, "uint4", 32, has_zeros=True, ordered=False)


def drawn(code, group, zeros="whole", ordered=False):
    """All codes of a kind, whatever they are rounded from."""
    random = np.random.default_rng(0)
    groups, top = WIDTH // group, 2 ** bits_of(code)
    codes = random.integers(0, top, (OUT, WIDTH), dtype=np.uint8)
    scales = random.uniform(0.01, 1, (OUT, groups)).astype(np.float16)
    of_groups = {"none": None, "whole": random.integers(0, top + 1, (OUT, groups))}
    of_groups["broken"] = random.uniform(0, top, (OUT, groups))  # as HQQ has them
    columns = random.permutation(WIDTH).astype(np.int32) if ordered else None
    return Codes.from_unpacked(code, codes, scales, of_groups[zeros], columns)


@pytest.mark.parametrize(
    ("code", "group", "zeros", "ordered"),
    [
        ("uint4", 32, "whole", False),
        ("uint4", WIDTH, "whole", False),
        ("uint4", 32, "whole", True),
        ("uint4", 64, "broken", False),
        ("uint8", 32, "whole", False),
        ("uint8", 64, "broken", True),
        ("int8", WIDTH, "none", False),
    ],
)
def test_the_documented_product_is_that_of_the_matrix(code, group, zeros, ordered):
    codes = drawn(code, group, zeros, ordered)
    made = to_integers(codes)
    bits = bits_of(code)
    assert made.codes.dtype == np.int8
    assert made.codes.shape == (WIDTH, OUT * bits // 8)
    assert made.codes.flags.c_contiguous
    assert made.scales.shape == (WIDTH // group, OUT)
    assert (made.offsets is None) == (zeros == "none")
    matrix = documented_matrix(made.codes, made.scales, made.offsets, 0 if group == WIDTH else group, bits)
    x = np.random.default_rng(1).normal(0, 1, (5, WIDTH))
    gathered = x if made.columns is None else x[:, made.columns]
    error = 1e-3 if zeros == "broken" else 1e-9  # of sums up to 1e3: offsets that are no whole numbers are rounded
    np.testing.assert_allclose(gathered @ matrix, x @ codes.values().T, rtol=0, atol=error)


def test_in_fp16_it_is_to_the_last_bit_what_the_composition_rounds():
    codes = drawn("uint4", 32)
    made = to_integers(codes)
    matrix = documented_matrix(made.codes, made.scales, made.offsets, 32, 4, np.float16)
    np.testing.assert_array_equal(matrix, codes.values().T.astype(np.float16))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"code": "uint8"}, True),
        ({"code": "int8", "group": WIDTH}, True),
        ({"code": "nf4"}, False),
        ({"code": "fp4"}, False),
        ({"code": "e4m3"}, False),
        ({"group": 16}, False),
        ({"group": 48, "in_features": 96}, False),
        ({"group": 80, "in_features": 80}, True),  # whole rows are no groups
        ({"out_features": 47}, False),
        ({"out_features": 47, "code": "uint8"}, True),
        ({"out_features": 65536}, False),
        ({"in_features": 65536}, False),
        ({"in_features": 65536 - 32}, True),
    ],
)
def test_what_the_operator_takes(changes, wanted):
    assert fits_integers(replace(SPEC, **changes)) == wanted
