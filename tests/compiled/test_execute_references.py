"""The numpy references of fused operators, forward and backward, against PyTorch and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from mindllm.compiled.execute import references as subject

RANDOM = np.random.default_rng(5)
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def leaf(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, requires_grad=True)


def test_rms_norm():
    x, weight, gradient = normal(6, 16), normal(16), normal(6, 16)
    norm = LlamaRMSNorm(16, eps=1e-5)
    norm.weight.data = torch.tensor(weight)
    tensor = leaf(x)
    wanted = norm(tensor)
    wanted.backward(torch.tensor(gradient))
    found, reciprocal = subject.rms_norm(x, weight, 1e-5)
    assert reciprocal.shape == (6, 1)
    np.testing.assert_allclose(found, wanted.detach(), **CLOSE)
    of_x, of_weight = subject.rms_norm_gradient(gradient, x, reciprocal, weight)
    np.testing.assert_allclose(of_x, tensor.grad, **CLOSE)
    np.testing.assert_allclose(of_weight, norm.weight.grad, **CLOSE)


def test_silu_and_swiglu():
    x, gradient = normal(5, 12) * 4, normal(5, 6)
    tensor = leaf(x)
    first, second = tensor.chunk(2, -1)
    wanted = torch.nn.functional.silu(first) * second
    wanted.backward(torch.tensor(gradient))
    np.testing.assert_allclose(subject.swiglu(x), wanted.detach(), **CLOSE)
    np.testing.assert_allclose(subject.swiglu_gradient(gradient, x), tensor.grad, **CLOSE)
    assert np.isfinite(subject.silu(np.float32([-1e4, 1e4]))).all()


def numeric_gradient(function, x: np.ndarray, gradient: np.ndarray, step: float = 1e-3) -> np.ndarray:
    """Central differences of ``sum(gradient * function(x))``, in double precision."""
    x = x.astype(np.float64)
    found = np.empty(x.size)
    for place in range(x.size):
        moved = [x.reshape(-1).copy() for _ in range(2)]
        moved[0][place] += step
        moved[1][place] -= step
        above, below = (np.sum(gradient * function(values.reshape(x.shape))) for values in moved)
        found[place] = (above - below) / (2 * step)
    return found.reshape(x.shape)


def test_rotary_by_halves_is_that_of_transformers():
    x, angles = normal(2, 3, 7, 8), normal(7, 4)
    doubled = torch.tensor(np.concatenate([angles, angles], -1))[None]
    cos, sin = doubled.cos(), doubled.sin()
    wanted = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin)[0]
    np.testing.assert_allclose(subject.rotary(x, cos.numpy()[None], sin.numpy()[None]), wanted, **CLOSE)


def test_rotary_of_neighbours_multiplies_complex_numbers():
    x, angles = normal(2, 3, 7, 8), np.repeat(normal(7, 4), 2, -1)[None, None]
    cos, sin = np.cos(angles), np.sin(angles)
    wanted = (x[..., ::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)[..., ::2]
    found = subject.rotary(x, cos, sin, subject.NEIGHBOURS)
    np.testing.assert_allclose(found[..., ::2] + 1j * found[..., 1::2], wanted, **CLOSE)
    angles = np.concatenate([angles[..., ::2]] * 2, -1)
    moved = subject.rotary(x, np.cos(angles), np.sin(angles), subject.NEIGHBOURS_TO_HALVES)
    np.testing.assert_allclose(moved, np.concatenate([wanted.real, wanted.imag], -1), **CLOSE)


def test_rotary_by_quarters_turns_both_halves_for_themselves():
    x, cos, sin = normal(1, 1, 7, 8), normal(1, 1, 7, 8), normal(1, 1, 7, 8)
    found = subject.rotary(x, cos, sin, subject.QUARTERS)
    halves = [
        subject.rotary(*parts) for parts in zip(*(np.split(array, 2, -1) for array in (x, cos, sin)), strict=True)
    ]
    np.testing.assert_allclose(found, np.concatenate(halves, -1), **CLOSE)


@pytest.mark.parametrize("mode", range(4))
def test_gradients_of_every_rotary_mode(mode):
    x, cos, sin, gradient = normal(2, 2, 3, 8), normal(1, 1, 3, 8), normal(1, 1, 3, 8), normal(2, 2, 3, 8)
    found = subject.rotary_gradient(gradient, cos, sin, x, mode)
    functions = (
        lambda value: subject.rotary(value, cos, sin, mode),
        lambda value: subject.rotary(x, value, sin, mode),
        lambda value: subject.rotary(x, cos, value, mode),
    )
    for array, function, value in zip(found, functions, (x, cos, sin), strict=True):
        np.testing.assert_allclose(array, numeric_gradient(function, value, gradient), rtol=1e-4, atol=1e-4)


def test_layer_norm():
    x, weight, bias, gradient = normal(6, 16), normal(16), normal(16), normal(6, 16)
    tensors = leaf(x), leaf(weight), leaf(bias)
    wanted = torch.nn.functional.layer_norm(tensors[0], (16,), *tensors[1:], 1e-3)
    wanted.backward(torch.tensor(gradient))
    found, mean, reciprocal = subject.layer_norm(x, (16,), weight, bias, 1e-3)
    np.testing.assert_allclose(found, wanted.detach(), **CLOSE)
    gradients = subject.layer_norm_gradient(gradient, x, (16,), mean, reciprocal, weight, bias, (1, 1, 1))
    for array, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(array, tensor.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("approximate", [subject.EXACT, subject.BY_TANH])
def test_gelu(approximate):
    x, gradient = normal(5, 12) * 3, normal(5, 12)
    tensor = leaf(x)
    wanted = torch.nn.functional.gelu(tensor, approximate="tanh" if approximate == subject.BY_TANH else "none")
    wanted.backward(torch.tensor(gradient))
    np.testing.assert_allclose(subject.gelu(x, approximate), wanted.detach(), **CLOSE)
    np.testing.assert_allclose(subject.gelu_gradient(gradient, x, approximate), tensor.grad, **CLOSE)


def test_fast_gelu():
    x, gradient = normal(5, 12) * 3, normal(5, 12)
    tensor = leaf(x)
    wanted = tensor * torch.sigmoid(1.702 * tensor)
    wanted.backward(torch.tensor(gradient))
    np.testing.assert_allclose(subject.fast_gelu(x), wanted.detach(), **CLOSE)
    np.testing.assert_allclose(subject.fast_gelu_gradient(gradient, x), tensor.grad, **CLOSE)


@pytest.mark.parametrize("largest", [True, False])
def test_sorted_and_largest_values(largest):
    x = normal(4, 9)
    for found, wanted in (
        (subject.largest_values(x, 3, 0, largest), torch.topk(torch.tensor(x), 3, 0, largest)),
        (subject.sorted_values(x, -1, largest), torch.sort(torch.tensor(x), -1, largest)),
    ):
        for array, tensor in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(array, tensor)


def test_pieces_of_arrays():
    x = normal(4, 9)
    references = subject.REFERENCES
    np.testing.assert_array_equal(references["SliceExt"](x, -1, 1, 8, 3), x[:, 1:8:3])
    np.testing.assert_array_equal(references["CumsumExt"](x, 1, None), np.cumsum(x, 1))
    found = references["SplitTensor"](x, 4, 1)
    for array, tensor in zip(found, torch.split(torch.tensor(x), 4, 1), strict=True):
        np.testing.assert_array_equal(array, tensor)
    assert not references["InplaceZero"](x).any()
    assert references["Copy"](x) is not x


def test_a_table_and_its_gradient():
    table, indices, gradient = normal(7, 4), np.array([[1, 6], [1, 0]], np.int32), normal(2, 2, 4)
    weights = leaf(table)
    wanted = torch.nn.functional.embedding(torch.tensor(indices), weights)
    wanted.backward(torch.tensor(gradient))
    np.testing.assert_array_equal(subject.embedding(indices, table, None, None, 2.0, False), wanted.detach())
    np.testing.assert_allclose(subject.embedding_gradient(gradient, indices, 7, None, False), weights.grad, **CLOSE)
    outside = np.array([-1, 2, 7])
    np.testing.assert_array_equal(subject.embedding(outside, table), np.stack([0 * table[0], table[2], 0 * table[0]]))
    assert not subject.embedding_gradient(normal(3, 4), np.array([-1, 9, 7]), 7).any()


def test_what_says_whether_all_is_finite():
    references = subject.REFERENCES
    assert references["ReduceAll"](np.array([True, True]), None, False)
    assert not references["ReduceAll"](np.array([[True, False]]), (0, 1), False)
    np.testing.assert_array_equal(references["ReduceAll"](np.array([[True, False]]), (0,), False), [True, False])
    np.testing.assert_array_equal(
        references["Outer"](np.arange(3.0), np.arange(2.0)), np.outer(np.arange(3.0), np.arange(2.0))
    )
    assert references["NPUGetFloatStatusV2"](np.ones(8, np.int32)).tolist() == [0] * 8


def test_what_a_reference_does_not_know_is_refused():
    x = normal(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="mode 7"):
        subject.rotary(x, x, x, 7)
