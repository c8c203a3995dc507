"""Every format of codes against a packing of its own: the library it comes from, or loops over single codes."""

import json
from pathlib import Path

import numpy as np
import pytest
import quantized_files as files
from hypothesis import given, settings
from hypothesis import strategies as st

from mindllm.architecture.quantization import bits_of
from mindllm.config.quantization import QuantizationConfig, read_quantization
from mindllm.errors import UserError
from mindllm.quantize import Codes, byte_table, code_values, pack, unpack
from mindllm.weight_files.quantized import Awq, Gptq, QuantizedModule, find_format, substitute_matrices

OUT, WIDTH = 16, 128
AT = Path("config.json")


def section(**content):
    return read_quantization(AT, content)


def read(parts, config):
    arrays = {name: np.asarray(part) for name, part in parts.items()}
    module = QuantizedModule(Path("model"), "layer", arrays)
    form = find_format(config)(module, config)
    codes = form.read()
    assert form.shape() == codes.shape == codes.values().shape
    return codes


def drawn(bits, groups, seed=0, out=OUT, width=WIDTH):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (out, width), dtype=np.uint8)
    scales = random.uniform(0.01, 1, (out, groups)).astype(np.float16).astype(np.float32)
    return codes, scales, random.integers(1, 2**bits, (out, groups))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq_in_both_versions_and_orders(bits, form, ordered):
    codes, scales, zeros = drawn(bits, 4)
    groups = np.arange(WIDTH) // 32
    if ordered:
        groups = np.random.default_rng(1).permutation(groups)
    stored = files.gptq(codes, scales, zeros, groups, bits, less_one=form == "gptq")
    config = section(quant_method="gptq", bits=bits, group_size=32, desc_act=ordered, checkpoint_format=form)
    wanted = (codes - zeros[:, groups].astype(np.float32)) * scales[:, groups]
    np.testing.assert_array_equal(read(stored, config).values(), wanted)


def test_awq():
    codes, scales, zeros = drawn(4, 2)
    config = section(quant_method="awq", bits=4, group_size=64, zero_point=True)
    wanted = (codes - np.repeat(zeros, 64, 1).astype(np.float32)) * np.repeat(scales, 64, 1)
    np.testing.assert_array_equal(read(files.awq(codes, scales, zeros), config).values(), wanted)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_four_bits_of_bitsandbytes(kind, double):
    weight = np.random.default_rng(0).normal(0, 1, (48, WIDTH)).astype(np.float32)
    stored, wanted = files.four_bit(weight, kind, double)
    config = section(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type=kind)
    np.testing.assert_allclose(read(stored, config).values(), wanted, atol=1e-6)


def test_a_block_of_bitsandbytes_may_end_within_a_row():
    weight = np.random.default_rng(0).normal(0, 1, (48, 80)).astype(np.float32)
    stored, _ = files.four_bit(weight, "nf4", False)
    config = section(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    codes = read(stored, config)
    flat, _ = files.four_bit(weight.reshape(-1, 64), "nf4", False)
    np.testing.assert_array_equal(stored["weight"], flat["weight"])
    np.testing.assert_allclose(codes.values(), weight, atol=0.16 * np.abs(weight).max())
    assert codes.group == 16


def test_eight_bits_of_bitsandbytes():
    weight = np.random.default_rng(0).normal(0, 1, (OUT, WIDTH)).astype(np.float32)
    stored, wanted = files.eight_bit(weight)
    config = section(quant_method="bitsandbytes", load_in_8bit=True)
    np.testing.assert_allclose(read(stored, config).values(), wanted, atol=2e-3)


@pytest.mark.parametrize("shape", [(64, 96), (40, 56)])
def test_blocks_of_fp8(shape):
    stored, wanted = files.fp8(np.random.default_rng(0).normal(0, 1, shape).astype(np.float32), 32)
    config = section(quant_method="fp8", weight_block_size=[32, 32], activation_scheme="dynamic")
    np.testing.assert_array_equal(read(stored, config).values(), wanted)


def test_hqq():
    codes, scales, zeros = drawn(4, 2)
    zeros = zeros + 0.5
    config = section(
        quant_method="hqq", quant_config={"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}
    )
    wanted = (codes - np.repeat(zeros, 64, 1)) * np.repeat(scales, 64, 1)
    np.testing.assert_allclose(read(files.hqq(codes, scales, zeros), config).values(), wanted, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.booleans(), st.integers(0, 2**32 - 1))
def test_what_is_written_is_read(bits, groups, eighths, ordered, seed):
    out, width = 8 * eighths, 32
    codes, scales, zeros = drawn(bits, groups, seed, out, width)
    code = "uint4" if bits == 4 else "uint8"
    columns = np.random.default_rng(seed).permutation(width).astype(np.int32) if ordered else None
    whole = Codes.from_unpacked(code, codes, scales, zeros, columns)
    size = width // groups
    config = QuantizationConfig(quant_method="gptq", code=code, group_size=size, act_order=ordered)
    np.testing.assert_array_equal(read(Gptq.tensors(whole), config).values(), whole.values())
    if bits == 4 and not ordered:
        config = QuantizationConfig(quant_method="awq", code=code, group_size=size)
        np.testing.assert_array_equal(read(Awq.tensors(whole), config).values(), whole.values())
    some = np.random.default_rng(seed).permutation(out)[:3]
    np.testing.assert_array_equal(whole.rows(some).values(), whole.values()[some])


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda found: len(found) % 2 == 0))
def test_packing_is_undone(values):
    codes = np.array(values, np.uint8)
    np.testing.assert_array_equal(unpack(pack(codes, 4), 4), codes)


@pytest.mark.parametrize("code", ["uint4", "uint8", "int8", "nf4", "fp4", "e4m3"])
def test_a_table_of_bytes_is_that_of_codes(code):
    every = np.arange(256, dtype=np.uint8)
    unpacked = unpack(every[:, None], bits_of(code))
    np.testing.assert_array_equal(byte_table(code), code_values(code)[unpacked])


FAULTS = {
    "no scales": (lambda parts: parts.pop("scales"), "layer.scales: missing"),
    "scales of other groups": (
        lambda parts: parts.update(scales=parts["scales"][:1]),
        r"layer.scales: has shape \[1, 16\] instead of \[4, 16\]",
    ),
    "zero points of another type": (
        lambda parts: parts.update(qzeros=parts["qzeros"].astype(np.float32)),
        "layer.qzeros: is of float32 instead of int32",
    ),
    "scales that are no numbers": (
        lambda parts: parts["scales"].fill(np.nan),
        "layer.scales: has values that are not finite",
    ),
    "groups that are not there": (lambda parts: parts["g_idx"].fill(9), "layer.g_idx: has groups 9 to 9 of 4"),
    "an order nobody spoke of": (
        lambda parts: parts.update(g_idx=parts["g_idx"][::-1].copy()),
        "layer.g_idx: groups are not in order",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_tensor(fault):
    codes, scales, zeros = drawn(4, 4)
    parts = files.gptq(codes, scales, zeros, np.arange(WIDTH) // 32, 4)
    change, message = FAULTS[fault]
    change(parts)
    with pytest.raises(UserError, match=message):
        read(parts, section(quant_method="gptq", bits=4, group_size=32))


def test_a_directory_without_the_codes_it_announces():
    config = section(quant_method="awq", bits=4)
    with pytest.raises(UserError, match=r"no tensor ends in \.qweight, but config.json has quant_method awq"):
        substitute_matrices(Path("model"), {"layer.weight": np.zeros((2, 2))}, config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "quantization_config: must be an object"),
        ({}, "quant_method: missing"),
        ({"quant_method": "gtpq"}, "quant_method: this method is not read; did you mean 'gptq'"),
        ({"quant_method": "gptq", "bits": 3}, r"bits: this form is not read; read: 4 or 8 \(value 3\)"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: this form"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: this packing is not read"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size: must be a number of columns"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit: neither"),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "weight_block_size: blocks that are not square"),
        ({"quant_method": "hqq", "quant_config": {"self_attn": {}}}, "weight_quant_params: missing"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "x"}, "must be a list of names"),
    ],
)
def test_what_is_not_read_is_named(content, message):
    with pytest.raises(UserError, match=message) as caught:
        read_quantization(AT, content)
    assert "\n" not in str(caught.value)
    json.dumps(str(caught.value))
