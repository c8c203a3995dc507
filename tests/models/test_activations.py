"""Activations beside their formulas, values and gradients."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindllm.models.linear import ACTIVATIONS

X = np.linspace(-6, 6, 201).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


FORMULAS = {"silu": lambda x: x * sigmoid(x), "gelu_tanh": gelu_tanh, "quick_gelu": lambda x: x * sigmoid(1.702 * x)}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_they_are_their_formulas(name):
    cell, formula = ACTIVATIONS[name](), FORMULAS[name]
    np.testing.assert_allclose(cell(Tensor(X)).asnumpy(), formula(X), atol=2e-6)
    step = 1e-5
    slope = (formula(X.astype(np.float64) + step) - formula(X.astype(np.float64) - step)) / (2 * step)
    np.testing.assert_allclose(ms.grad(cell)(Tensor(X)).asnumpy(), slope, atol=5e-6)
