"""Sorted tokens beside places for all: the same results, gradients and counts, however tokens fall on experts."""

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from mindllm.architecture.experts import ExpertsSpec, RouterSpec
from mindllm.architecture.parts import FeedForwardSpec
from mindllm.models import Kernels
from mindllm.models.experts.experts import Experts
from mindllm.models.experts.grouped_experts import GroupedFeedForward, TokensInBlocks, block_rows, most_blocks
from mindllm.models.experts.sent_tokens import even_counts, guard_choices
from mindllm.models.weights import InitStd, initialise

BATCH, LENGTH, HIDDEN, EXPERTS, CHOSEN, WIDTH = 2, 12, 8, 6, 2, 5
X = np.random.default_rng(0).standard_normal((BATCH * LENGTH, HIDDEN)).astype(np.float32)
KERNELS = Kernels(fused=False, flash_attention=False, activation=ms.float32, operand=ms.float32, cpu=True)
PLACES = ExpertsSpec(RouterSpec(EXPERTS, CHOSEN, balance_losses=(("expert", 0.5),)), FeedForwardSpec(HIDDEN, WIDTH))
SORTED = replace(PLACES, grouped=True)
TOKENS = 7


def built(spec):
    cell = Experts(spec, KERNELS, InitStd(0.5, 0.5), LENGTH)
    initialise({parameter.name: parameter for parameter in cell.get_parameters()}, seed=0)
    return cell


def all_of(cell, x):
    """Results, what is added to the loss, and gradients of hidden states and of all weights and counters."""

    def loss(x):
        y, added = cell(x, BATCH)
        return (y * y).sum() + added.sum(), y, added

    (_, y, added), (of_x, of_weights) = ms.value_and_grad(loss, 0, cell.trainable_params(), has_aux=True)(Tensor(x))
    names = [parameter.name for parameter in cell.trainable_params()]
    found = {"y": y, "added": added, "x": of_x, **dict(zip(names, of_weights, strict=True))}
    return {name: value.asnumpy() for name, value in found.items()}


def test_results_gradients_losses_and_loads_are_those_of_places_for_all():
    wanted, found = (all_of(built(spec), X) for spec in (PLACES, SORTED))
    assert found.keys() == wanted.keys()
    assert {"experts.w1.weight", "router.weight", "load.probe"} < found.keys()
    for name, value in wanted.items():
        assert np.abs(value).max() > 0, name
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def feed_forward():
    cell = GroupedFeedForward(EXPERTS, SORTED.expert, KERNELS, InitStd(0.5, 0.5))
    initialise({parameter.name: parameter for parameter in cell.get_parameters()}, seed=0)
    return cell


CHOICES = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), min_size=CHOSEN, max_size=CHOSEN, unique=True),
    min_size=TOKENS,
    max_size=TOKENS,
)


def by_hand(cell, chosen, weights):
    w1, w3, w2 = (getattr(cell, name).weight.asnumpy() for name in ("w1", "w3", "w2"))
    result = np.zeros((TOKENS, HIDDEN), np.float32)
    for token, (experts, factors) in enumerate(zip(chosen, weights, strict=True)):
        for expert, factor in zip(experts, factors, strict=True):
            gate = w1[expert] @ X[token]
            result[token] += factor * (w2[expert] @ (gate / (1 + np.exp(-gate)) * (w3[expert] @ X[token])))
    return result


@settings(max_examples=12, deadline=None)
@given(CHOICES)
def test_any_choice_is_computed(feed_forward, chosen):
    check(feed_forward, chosen)


@pytest.mark.parametrize("chosen", [[[0, 1]] * TOKENS, [[5, 0]] * TOKENS, [[4, 5]] * (TOKENS - 1) + [[0, 5]]])
def test_experts_that_all_or_none_choose(feed_forward, chosen):
    check(feed_forward, chosen)


def check(cell, chosen):
    chosen = np.array(chosen, np.int32)
    weights = np.linspace(0.1, 1.0, TOKENS * CHOSEN, dtype=np.float32).reshape(TOKENS, CHOSEN)
    found = cell(Tensor(X[:TOKENS]), Tensor(chosen[None]), Tensor(weights[None])).asnumpy()
    np.testing.assert_allclose(found, by_hand(cell, chosen, weights), rtol=1e-4, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(CHOICES)
def test_ranks_that_share_experts_add_up_to_all(feed_forward, chosen):
    """Each has three of the six: choices of others' experts have the number three, and no weight."""
    chosen = np.array(chosen, np.int32)
    weights = np.linspace(0.1, 1.0, TOKENS * CHOSEN, dtype=np.float32).reshape(TOKENS, CHOSEN)
    own, total, order = EXPERTS // 2, np.zeros((TOKENS, HIDDEN), np.float32), TokensInBlocks(EXPERTS // 2, shared=True)
    for first in (0, own):
        local = chosen - first
        foreign = (local < 0) | (local >= own)
        rows, places, owners = order(Tensor(X[:TOKENS]), Tensor(np.where(foreign, own, local).astype(np.int32)))
        w1, w3, w2 = (
            Tensor(getattr(feed_forward, name).weight.asnumpy()[first : first + own]) for name in ("w1", "w3", "w2")
        )
        inner = feed_forward.activation(feed_forward.w1(rows, w1, owners)) * feed_forward.w3(rows, w3, owners)
        y = feed_forward.w2(inner, w2, owners)
        kept = Tensor(np.where(foreign, 0, weights).astype(np.float32))
        total += order.weighted_sum(y, places, kept, owners).asnumpy()
    np.testing.assert_allclose(total, by_hand(feed_forward, chosen, weights), rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9))
def test_blocks_are_enough_for_any_choice(of_experts):
    rows = sum(of_experts)
    size = block_rows(rows, len(of_experts))
    assert 8 <= size <= 128
    assert sum(-(-count // size) for count in of_experts) <= most_blocks(rows, len(of_experts), size)
    assert most_blocks(rows, len(of_experts), size) * size <= rows + len(of_experts) * (size - 1)


@pytest.mark.parametrize(("experts", "ranks", "chosen"), [(4, 2, 2), (8, 4, 3), (256, 64, 8), (8, 8, 1)])
def test_every_rank_is_sent_something(experts, ranks, chosen):
    """Whatever the router chooses: zeros go to an expert of each rank."""
    guards = guard_choices(experts, ranks, chosen).asnumpy()
    assert guards.size < ranks + chosen
    assert {*(guards.reshape(-1) // (experts // ranks))} == {*range(ranks)}


@pytest.mark.parametrize(("rows", "ranks", "own"), [(12, 2, 2), (13, 2, 3), (34, 4, 8), (70, 8, 1)])
def test_even_counts_are_those_that_all_ranks_agree_on(rows, ranks, own):
    of_ranks = [even_counts(rows, ranks, rank, own) for rank in range(ranks)]
    for place, (sent, arriving, ends) in enumerate(of_ranks):
        assert sum(sent) == rows
        assert arriving == tuple(other[0][place] for other in of_ranks)
        assert ends.asnumpy()[-1] == sum(arriving)
        sizes = np.diff(ends.asnumpy(), prepend=0)
        assert sizes.max() - sizes.min() <= 1
