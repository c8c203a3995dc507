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


@pytest.mark.parametrize("mode", [subject.HALVES, subject.NEIGHBOURS])
def test_rotary(mode):
    x, gradient, angles = normal(2, 3, 7, 8), normal(2, 3, 7, 8), normal(7, 4)
    doubled = np.concatenate([angles, angles], -1) if mode == subject.HALVES else np.repeat(angles, 2, -1)
    cos, sin = np.cos(doubled)[None, None], np.sin(doubled)[None, None]
    tensor, tables = leaf(x), (leaf(cos), leaf(sin))
    if mode == subject.HALVES:
        wanted = apply_rotary_pos_emb(tensor, tensor, tables[0][0], tables[1][0])[0]
    else:  # a pair is a complex number that is multiplied by one
        turned = torch.view_as_complex(tensor.reshape(2, 3, 7, 4, 2)) * torch.view_as_complex(
            torch.stack([tables[0][..., ::2], tables[1][..., ::2]], -1)
        )
        wanted = torch.view_as_real(turned).reshape(2, 3, 7, 8)
    wanted.backward(torch.tensor(gradient))
    np.testing.assert_allclose(subject.rotary(x, cos, sin, mode), wanted.detach(), **CLOSE)
    of_x, of_cos, of_sin = subject.rotary_gradient(gradient, cos, sin, x, mode)
    np.testing.assert_allclose(of_x, tensor.grad, **CLOSE)
    if mode == subject.HALVES:
        np.testing.assert_allclose(of_cos, tables[0].grad, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(of_sin, tables[1].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("sparse_mode", [subject.WHOLE_MASK, subject.CAUSAL, subject.CAUSAL_TO_THE_END])
def test_attention(kv_heads, sparse_mode):
    query, key, value = normal(2, 4, 5, 8), normal(2, kv_heads, 7, 8), normal(2, kv_heads, 7, 8)
    gradient = normal(2, 4, 5, 8)
    hidden = RANDOM.random((2, 1, 5, 7)) < 0.3
    hidden[..., 0] = False
    if sparse_mode != subject.WHOLE_MASK:
        hidden = np.triu(np.ones((5, 7), bool), 1 + (2 if sparse_mode == subject.CAUSAL_TO_THE_END else 0))
    settings = (4, 1.0, 0.25, 2147483647, 2147483647, 0, subject.BNSD, sparse_mode)
    tensors = leaf(query), leaf(key), leaf(value)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.tensor(~hidden), scale=0.25, enable_gqa=True
    )
    wanted.backward(torch.tensor(gradient))
    mask = hidden.astype(np.uint8)
    largest, total, _, context = subject.attention(
        query, key, value, None, None, None, mask, None, None, None, *settings
    )
    assert largest.shape == total.shape == (2, 4, 5, subject.STATISTICS)
    np.testing.assert_allclose(context, wanted.detach(), **CLOSE)
    found = subject.attention_gradient(
        query, key, value, gradient, None, None, None, mask, largest, total, None, context, None, None, None, *settings
    )
    for array, tensor in zip(found[:3], tensors, strict=True):
        np.testing.assert_allclose(array, tensor.grad, rtol=1e-4, atol=5e-6)


def test_what_a_reference_does_not_know_is_refused():
    x = normal(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="input_layout 0"):
        subject.attention(x, x, x, *[None] * 7, 1, 1.0, 1.0, 0, 0, 0, 0, 0)
    with pytest.raises(NotImplementedError, match="mode 7"):
        subject.rotary(x, x, x, 7)
