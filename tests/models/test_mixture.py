"""Routing and dispatch beside numpy: which experts, which weights, who is dropped, what keeps them balanced."""

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindllm.architecture.experts import ExpertsSpec, RouterSpec
from mindllm.architecture.parts import FeedForwardSpec
from mindllm.models import Kernels
from mindllm.models.experts.experts import Experts
from mindllm.models.experts.router import Router
from mindllm.models.weights import InitStd

BATCH, LENGTH, HIDDEN, EXPERTS, WIDTH = 2, 12, 8, 6, 5
GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((BATCH * LENGTH, HIDDEN)).astype(np.float32)
WEIGHT = GENERATOR.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
BIAS = np.array([0.5, 0, 0, -0.5, 0, 0.3], np.float32)
KERNELS = Kernels(fused=False, flash_attention=False, activation=ms.float32, operand=ms.float32, cpu=True)


def scores_of(sigmoid):
    logits = (X @ WEIGHT.T).reshape(BATCH, LENGTH, EXPERTS)
    if sigmoid:
        return logits, 1 / (1 + np.exp(-logits))
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return logits, exponentials / exponentials.sum(-1, keepdims=True)


def chosen_by(choice, count):
    return np.argsort(-choice, axis=-1, kind="stable")[..., :count]


def routed(spec):
    router = Router(spec, HIDDEN, 0.02)
    router.weight.set_data(Tensor(WEIGHT))
    if spec.bias:
        router.bias.set_data(Tensor(BIAS))
    return router(Tensor(X), BATCH)


def test_a_bias_decides_who_is_chosen_and_no_weight():
    chosen, weights, mask, _ = routed(RouterSpec(EXPERTS, 2, sigmoid=True, renormalise=True, scale=2.5, bias=True))
    _, scores = scores_of(sigmoid=True)
    wanted = chosen_by(scores + BIAS, 2)
    assert (wanted != chosen_by(scores, 2)).any()
    np.testing.assert_array_equal(chosen.asnumpy(), wanted)
    picked = np.take_along_axis(scores, wanted, -1)
    np.testing.assert_allclose(weights.asnumpy(), 2.5 * picked / picked.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(mask.asnumpy().sum(-1), 2)


@pytest.mark.parametrize("bias", [False, True])
def test_only_experts_of_the_best_groups_are_chosen(bias):
    chosen = routed(RouterSpec(EXPERTS, 2, groups=3, chosen_groups=1, bias=bias))[0].asnumpy()
    _, scores = scores_of(sigmoid=False)
    grouped = (scores + BIAS * bias).reshape(BATCH, LENGTH, 3, 2)
    best = (grouped.sum(-1) if bias else grouped.max(-1)).argmax(-1)
    np.testing.assert_array_equal(chosen // 2, np.broadcast_to(best[..., None], chosen.shape))


def test_what_keeps_experts_balanced_is_that_of_the_papers():
    losses = (("expert", 0.5), ("switch", 0.25))
    added = routed(RouterSpec(EXPERTS, 2, balance_losses=losses, z_loss=0.125))[3].asnumpy()
    logits, scores = scores_of(sigmoid=False)
    counts = np.eye(EXPERTS)[chosen_by(scores, 2)].sum(2)  # [batch, length, experts]
    of_sequences = EXPERTS / 2 * (counts.mean(1) * scores.mean(1)).sum(-1)
    of_all = EXPERTS / 2 * (counts.mean((0, 1)) * scores.mean((0, 1))).sum()
    z = np.square(np.log(np.exp(logits).sum(-1))).mean(1)
    np.testing.assert_allclose(added, 0.5 * of_sequences + 0.25 * of_all + 0.125 * z, rtol=1e-5)


def test_groups_are_balanced_by_what_they_compute_and_receive():
    losses = (("expert", 1.0), ("device", 0.5), ("communication", 0.25))
    alone = RouterSpec(EXPERTS, 2, groups=3, chosen_groups=2, balance_losses=losses[:1])
    added = routed(replace(alone, balance_losses=losses))[3].asnumpy() - routed(alone)[3].asnumpy()
    chosen = routed(alone)[0].asnumpy()
    _, scores = scores_of(sigmoid=False)
    counts = np.eye(EXPERTS)[chosen].sum(2).reshape(BATCH, LENGTH, 3, 2)
    of_groups = scores.mean(1).reshape(BATCH, 3, 2).sum(-1)
    device = EXPERTS / 2 * (counts.mean((1, 3)) * of_groups).sum(-1)
    communication = 3 / 2 * (counts.max(-1).mean(1) * of_groups).sum(-1)
    np.testing.assert_allclose(added, 0.5 * device + 0.25 * communication, rtol=1e-4)


def test_full_experts_let_the_last_tokens_of_a_sequence_go():
    router = RouterSpec(EXPERTS, 2)
    capacity = 3
    spec = ExpertsSpec(router, FeedForwardSpec(HIDDEN, WIDTH), capacity_factor=capacity * EXPERTS / (2 * LENGTH))
    cell = Experts(spec, KERNELS, InitStd(0.5, 0.5), LENGTH)
    assert spec.capacity(LENGTH) == capacity
    ms.set_seed(0)
    cell.router.weight.set_data(Tensor(WEIGHT))
    w1, w3, w2 = (GENERATOR.standard_normal(getattr(cell.experts, name).weight.shape) for name in ("w1", "w3", "w2"))
    for name, value in (("w1", w1), ("w3", w3), ("w2", w2)):
        getattr(cell.experts, name).weight.set_data(Tensor(value.astype(np.float32)))

    def added(may_drop):
        return cell(Tensor(X), BATCH, may_drop)[1].sum()

    count = ms.value_and_grad(added, None, [cell.load.probe])
    for may_drop in (True, False):
        found = cell(Tensor(X), BATCH, may_drop)[0].asnumpy().reshape(BATCH, LENGTH, HIDDEN)
        wanted, dropped = by_hand(w1, w3, w2, capacity if may_drop else LENGTH)
        assert (dropped > 0) == may_drop
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        nothing, (counted,) = count(may_drop)
        assert float(nothing) == 0
        of_experts = np.bincount(chosen_by(scores_of(sigmoid=False)[1], 2).reshape(-1), minlength=EXPERTS)
        np.testing.assert_allclose(counted.asnumpy() * LENGTH, [*of_experts, dropped], rtol=1e-5, atol=1e-4)


def by_hand(w1, w3, w2, capacity):
    """The mixture token by token, and how often a token was let go."""
    _, scores = scores_of(sigmoid=False)
    chosen = chosen_by(scores, 2)
    result, dropped = np.zeros((BATCH, LENGTH, HIDDEN)), 0
    for row in range(BATCH):
        taken = np.zeros(EXPERTS, int)
        for token in range(LENGTH):
            x, total = X[row * LENGTH + token], scores[row, token, chosen[row, token]].sum()
            for expert in chosen[row, token]:
                taken[expert] += 1
                if taken[expert] > capacity:
                    dropped += 1
                    continue
                gate = w1[expert] @ x
                inner = gate / (1 + np.exp(-gate)) * (w3[expert] @ x)
                result[row, token] += scores[row, token, expert] / total * (w2[expert] @ inner)
    return result, dropped
