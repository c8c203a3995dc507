"""Ascend's operators for sorted tokens in numpy: together a mixture of experts, and gradients as PyTorch derives them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindllm.compiled.execute import references as subject
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Function, Input, Node, TensorType, TupleType
from mindllm.compiled.graph.cost import cost

RANDOM = np.random.default_rng(7)
TOKENS, CHOSEN, EXPERTS, HIDDEN, WIDTH = 9, 2, 4, 6, 5
CHOICES = np.stack([RANDOM.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)]).astype(np.int32)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
NOTHING = (None,) * 5


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def leaf(array):
    return torch.tensor(array, requires_grad=True)


def product(rows, matrices, ends, group_type=subject.GROUPS_OF_ROWS):
    return subject.grouped_product((rows,), (matrices,), *NOTHING, ends, 3, group_type, False, False)[0]


def test_a_mixture_and_its_gradients():
    x, matrices, weights = normal(TOKENS, HIDDEN), normal(EXPERTS, HIDDEN, WIDTH), normal(TOKENS, CHOSEN)
    gradient = normal(TOKENS, WIDTH)
    ends = np.cumsum(np.bincount(CHOICES.reshape(-1), minlength=EXPERTS))
    rows, places = subject.permute(x, CHOICES)
    y = product(rows, matrices, ends)
    found = subject.unpermute(y, places, weights)
    tensors = [leaf(array) for array in (x, matrices, weights)]
    of_choice = torch.einsum("th,tkhw->tkw", tensors[0], tensors[1][torch.tensor(CHOICES, dtype=torch.long)])
    wanted = (of_choice * tensors[2][..., None]).sum(1)
    wanted.backward(torch.tensor(gradient))
    np.testing.assert_allclose(found, wanted.detach(), **CLOSE)
    of_y, of_weights = subject.unpermute_gradient(y, gradient, places, weights)
    of_rows = product(of_y, np.swapaxes(matrices, 1, 2), ends)
    of_matrices = product(rows.T, of_y, ends, subject.GROUPS_OF_INNER)
    of_x = subject.permute_gradient(of_rows, places, CHOSEN)
    for mine, theirs in zip((of_x, of_matrices, of_weights), tensors, strict=True):
        np.testing.assert_allclose(mine, theirs.grad, **CLOSE)


def test_rows_of_an_expert_keep_the_order_of_tokens():
    rows, places = subject.permute(
        np.arange(3, dtype=np.float32)[:, None], np.array([[1, 0], [0, 1], [1, 2]], np.int32)
    )
    assert rows[:, 0].tolist() == [0, 1, 0, 1, 2, 2]
    assert places.tolist() == [2, 0, 1, 3, 4, 5]


def test_rows_behind_all_groups_are_not_numbers():
    y = product(normal(6, HIDDEN), normal(2, HIDDEN, WIDTH), np.array([1, 4]))
    assert np.isfinite(y[:4]).all()
    assert np.isnan(y[4:]).all()


def test_forms_that_are_not_computed_are_refused():
    with pytest.raises(NotImplementedError, match="group type -1"):
        product(normal(4, HIDDEN), normal(1, HIDDEN, WIDTH), np.array([4]), subject.ALL_ROWS)
    with pytest.raises(NotImplementedError, match="3 of 18 choices"):
        subject.permute(normal(TOKENS, HIDDEN), CHOICES, 3)
    with pytest.raises(NotImplementedError, match="MoeTokenUnpermute in padded mode"):
        subject.unpermute(normal(4, HIDDEN), np.arange(4), None, True)


@pytest.mark.parametrize(
    ("left", "right", "out"),
    [((18, 6), (4, 6, 5), (18, 5)), ((18, 5), (4, 5, 6), (18, 6)), ((6, 18), (18, 5), (4, 6, 5))],
)
def test_all_three_products_of_a_group_cost_as_much(left, right, out):
    """Forward, gradient of the rows, gradient of the matrices."""
    given = tuple(
        Input(name, TupleType((TensorType(shape, "float16"),))) for name, shape in (("x", left), ("w", right))
    )
    node = Node(
        "GroupedMatmul", "y", ("x", "w"), TupleType((TensorType(out, "float16"),)), "Default/GroupedMatmul-op0", {}
    )
    graph = CompiledGraph(0, (Function("step", (node,), given, "y"),), {}, {})
    assert cost(graph, node).products == 2 * 18 * 6 * 5
