"""The numpy reference of the fused attention in every form it is asked for, forward and backward, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindllm.compiled.execute import attention as subject

RANDOM = np.random.default_rng(5)
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
EVERYTHING = 2147483647
CAUSAL_MASK = np.triu(np.ones(subject.COMPRESSED_MASK, np.uint8), 1)
SCALE = 0.25


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def settings(mode: int, before: int = EVERYTHING, after: int = EVERYTHING, layout: int = subject.BNSD, heads: int = 4):
    return heads, 1.0, SCALE, before, after, 0, layout, mode


def both_passes(arrays, gradient, mask, given, shift=None):
    """The context, and the gradients of query, key, value and shift."""
    options = (shift, None, None, mask)
    largest, total, _, context = subject.attention(*arrays, *options, None, None, None, *given)
    rest = (largest, total, None, context, None, None, None)
    return context, subject.attention_gradient(*arrays, gradient, *options, *rest, *given)


def compare(arrays, gradient, mask, given, hidden, shift=None):
    """With PyTorch's attention, given the scores that are hidden; an added shift is scaled there, too."""
    context, found = both_passes(arrays, gradient, mask, given, shift)
    tensors = [torch.tensor(array, requires_grad=True) for array in (*arrays, *([] if shift is None else [shift]))]
    hiding = torch.where(torch.tensor(hidden), -torch.inf, 0.0)
    added = hiding if shift is None else hiding + SCALE * tensors[3]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *tensors[:3], attn_mask=added, scale=SCALE, enable_gqa=True
    )
    wanted.backward(torch.tensor(gradient))
    np.testing.assert_allclose(context, wanted.detach(), **CLOSE)
    for array, tensor in zip(found, tensors, strict=False):
        np.testing.assert_allclose(array, tensor.grad, rtol=1e-4, atol=5e-6)


def distances(rows: int, columns: int) -> np.ndarray:
    """How far behind its query a key is, counted from the first query and key."""
    return np.arange(columns) - np.arange(rows)[:, None]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_whole_mask_with_shared_heads(kv_heads):
    hidden = RANDOM.random((2, 1, 5, 7)) < 0.3
    hidden[..., 0] = False
    arrays = normal(2, 4, 5, 8), normal(2, kv_heads, 7, 8), normal(2, kv_heads, 7, 8)
    for mode in (subject.WHOLE_MASK, subject.ALL_MASK):
        compare(arrays, normal(2, 4, 5, 8), hidden.astype(np.uint8), settings(mode), hidden)


def test_no_mask_hides_nothing():
    arrays = normal(1, 4, 5, 8), normal(1, 4, 7, 8), normal(1, 4, 7, 8)
    compare(arrays, normal(1, 4, 5, 8), None, settings(subject.WHOLE_MASK, 1, 1), np.zeros((5, 7), bool))


def test_a_whole_mask_inside_a_band():
    hidden = distances(6, 6) > 0
    arrays = normal(1, 4, 6, 8), normal(1, 2, 6, 8), normal(1, 2, 6, 8)
    banded = hidden | (distances(6, 6) < -2)
    compare(arrays, normal(1, 4, 6, 8), hidden.astype(np.uint8), settings(subject.WHOLE_MASK, 2, 0), banded)


@pytest.mark.parametrize(("mode", "end"), [(subject.CAUSAL, 0), (subject.CAUSAL_TO_THE_END, 2)])
def test_causal_by_a_compressed_mask(mode, end):
    arrays = normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8)
    compare(arrays, normal(2, 4, 5, 8), CAUSAL_MASK, settings(mode), distances(5, 7) > end)


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 0), (3, 1), (EVERYTHING, 0), (4, -1)])
def test_a_band_of_keys(before, after):
    """A sliding window: positions are counted from the last query and key."""
    arrays = normal(2, 4, 6, 8), normal(2, 2, 9, 8), normal(2, 2, 9, 8)
    distance = distances(6, 9) - 3
    hidden = (distance > after) | (distance < -before)
    compare(arrays, normal(2, 4, 6, 8), CAUSAL_MASK, settings(subject.BAND, before, after), hidden)


def test_a_compressed_mask_is_read():
    """One that hides earlier keys instead of later ones does so; so does one for longer rows than it has."""
    inverted = (1 - CAUSAL_MASK).astype(np.uint8)
    given = subject.Settings.of(settings(subject.CAUSAL))
    assert np.array_equal(subject.hidden_scores(inverted, given, 5, 5), distances(5, 5) <= 0)
    long = subject.hidden_scores(inverted, given, 2050, 3)
    assert long[:2048].tolist() == (distances(2048, 3) <= 0).tolist()
    assert not long[2049, 0]  # further back than the mask reaches, where the kernel reads none
    assert long[2049].tolist() == [False, False, True]


def test_a_band_wider_than_the_mask():
    given = subject.Settings.of(settings(subject.BAND, 2100, 0))
    hidden = subject.hidden_scores(CAUSAL_MASK, given, 2200, 2200)
    assert np.array_equal(hidden, (distances(2200, 2200) > 0) | (distances(2200, 2200) < -2100))


@pytest.mark.parametrize("shape", [(1, 4, 6, 6), (2, 4, 6, 6)])
def test_scores_are_shifted(shape):
    arrays = normal(2, 4, 6, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8)
    hidden = distances(6, 6) > 0
    compare(arrays, normal(2, 4, 6, 8), CAUSAL_MASK, settings(subject.CAUSAL), hidden, shift=normal(*shape))


def test_linear_biases_given_for_the_last_queries(monkeypatch):
    """ALiBi (Press et al., 2022), with 1024 rows as 4."""
    monkeypatch.setattr(subject, "SHIFT_ROWS", 4)
    slopes = np.float32([0.5, 0.25, 0.125, 0.0625])[None, :, None, None]
    shift = slopes * np.minimum(distances(11, 11), 0)
    arrays = normal(1, 4, 11, 8), normal(1, 4, 11, 8), normal(1, 4, 11, 8)
    gradient, given = normal(1, 4, 11, 8), settings(subject.CAUSAL)
    wanted, of_whole = both_passes(arrays, gradient, CAUSAL_MASK, given, shift)
    found, of_last = both_passes(arrays, gradient, CAUSAL_MASK, given, shift[:, :, -4:])
    np.testing.assert_allclose(found, wanted, **CLOSE)
    for mine, theirs in zip(of_last[:3], of_whole[:3], strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)
    assert of_last[3] is None


@pytest.mark.parametrize(
    ("layout", "given", "back"),
    [
        (subject.BSND, lambda x: x.transpose(0, 2, 1, 3), lambda x, heads: x.transpose(0, 2, 1, 3)),
        (
            subject.BSH,
            lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1),
            lambda x, heads: x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3),
        ),
        (
            subject.SBH,
            lambda x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], x.shape[0], -1),
            lambda x, heads: x.reshape(*x.shape[:2], heads, -1).transpose(1, 2, 0, 3),
        ),
    ],
)
def test_other_layouts(layout, given, back):
    arrays, gradient = (normal(2, 4, 5, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)), normal(2, 4, 5, 8)
    wanted, gradients = both_passes(arrays, gradient, CAUSAL_MASK, settings(subject.CAUSAL))
    moved = tuple(map(given, arrays))
    found, others = both_passes(moved, given(gradient), CAUSAL_MASK, settings(subject.CAUSAL, layout=layout))
    assert found.shape == moved[0].shape
    np.testing.assert_allclose(back(found, 4), wanted, **CLOSE)
    for mine, theirs, heads in zip(others[:3], gradients[:3], (4, 2, 2), strict=True):
        np.testing.assert_allclose(back(mine, heads), theirs, **CLOSE)


def test_values_of_another_width():
    """As latent attention has them."""
    arrays = normal(1, 4, 5, 12), normal(1, 4, 5, 12), normal(1, 4, 5, 8)
    compare(arrays, normal(1, 4, 5, 8), CAUSAL_MASK, settings(subject.CAUSAL), distances(5, 5) > 0)


def test_a_row_that_is_hidden_whole_yields_zeros():
    hidden = np.zeros((5, 5), np.uint8)
    hidden[2] = 1
    arrays = normal(1, 4, 5, 8), normal(1, 4, 5, 8), normal(1, 4, 5, 8)
    context, found = both_passes(arrays, normal(1, 4, 5, 8), hidden, settings(subject.ALL_MASK))
    assert not context[:, :, 2].any()
    assert not found[0][:, :, 2].any()
    assert all(np.isfinite(array).all() for array in found[:3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1, 1.0, 1.0, 0, 0, 0, 7, 0), "input_layout 7"),
        ((1, 0.9, 1.0, 0, 0, 0, subject.BNSD, 0), "keep_prob 0.9"),
        ((1, 1.0, 1.0, 0, 0, 0, subject.BNSD, 5), "sparse_mode 5"),
        ((1, 1.0, 1.0, 0, 0, 0, subject.BNSD, 2), "sparse_mode 2 and a mask of shape None"),
    ],
)
def test_what_is_not_computed_here_is_refused(given, message):
    x = normal(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match=message):
        subject.attention(x, x, x, *[None] * 7, *given)


def test_what_a_compiled_graph_says_is_what_is_read_here():
    """The numbers of layouts are MindSpore's."""
    from mindspore._c_expression import op_enum

    names = {"BSH": subject.BSH, "BNSD": subject.BNSD, "SBH": subject.SBH, "BSND": subject.BSND}
    assert {name: op_enum.str_to_enum("FlashAttentionScore", "input_layout", name) for name in names} == names
