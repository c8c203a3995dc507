"""Experts balanced over global batches: beside numpy, in any order of micro batches, and over a resume."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import ops as P
from small_cluster import cluster_run

from mindllm.architecture.experts import RouterSpec
from mindllm.architecture.optimizer_state import SHARES
from mindllm.config import OptimizerConfig
from mindllm.models.experts.expert_load import ExpertLoad
from mindllm.models.experts.router import Router
from mindllm.models.weights import shares_of
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.engine import ReplicaEngine
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.step import AccumulateStep, ApplyAccumulated, TrainStep
from mindllm.verify.single import batch

VOCAB, HIDDEN, EXPERTS, CHOSEN, ROWS, LENGTH, STEPS, RATE = 32, 8, 4, 2, 4, 16, 4, 0.05
BALANCE, Z_LOSS = 3.0, 0.125
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
WEIGHT = RANDOM.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
IDS = RANDOM.integers(0, VOCAB, (STEPS, ROWS, LENGTH)).astype(np.int32)
MASKS = (RANDOM.random((STEPS, ROWS, LENGTH)) < RANDOM.uniform(0.3, 1, (STEPS, ROWS, 1))).astype(np.float32)
OPTIMIZER = OptimizerConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
MIXTURE = {
    "model_type": "mixtral",
    "num_layers": 1,
    "expert_num": 4,
    "num_experts_chosen": 2,
    "aux_loss_types": ["global"],
    "aux_loss_factors": [0.5],
}


class RoutedLoss(nn.Cell):
    """What a router adds to the loss of tokens that are looked up in a table, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        spec = RouterSpec(EXPERTS, CHOSEN, balance_losses=(("global", BALANCE),), z_loss=Z_LOSS)
        self.feed_forward = nn.Cell()
        self.feed_forward.router = Router(spec, HIDDEN, 0.02)
        self.feed_forward.load = ExpertLoad(spec)
        self.update_parameters_name("layer.")
        self.feed_forward.router.weight.set_data(Tensor(WEIGHT))
        self.table = Tensor(TABLE)

    def construct(self, ids, labels, loss_mask, segment_starts=None, position_ids=None, random=None):
        x = P.gather(self.table, ids.reshape((-1,)), 0)
        _, _, mask, added = self.feed_forward.router(x, ids.shape[0])
        counted = self.feed_forward.load(mask, P.ones((ids.shape[0], LENGTH, CHOSEN), ms.float32))
        return ((added + counted) * loss_mask.sum(1)).sum()


def trained(parts, order):
    """The router after each step, and what it is told then, when rows come in ``order`` and in so many ``parts``."""
    model = RoutedLoss()
    optimizer = AdamW(model.trainable_params(), OPTIMIZER, shares=shares_of(model))
    accumulate = AccumulateStep(model, optimizer.parameters, ROWS * LENGTH)
    step = TrainStep(model, optimizer, None) if parts == 1 else ApplyAccumulated(accumulate, optimizer, None)
    found, rate, scale = [], Tensor(RATE, ms.float32), Tensor(64.0, ms.float32)
    for ids, mask in zip(IDS[:, order], MASKS[:, order], strict=True):
        columns = [(Tensor(ids), Tensor(ids), Tensor(mask))]
        if parts > 1:
            columns = [
                tuple(map(Tensor, one)) for one in zip(*(np.split(x, parts) for x in (ids, ids, mask)), strict=True)
            ]
            for column in columns:
                accumulate(*column, scale)
            loss = step(rate, scale)[0]
        else:
            loss = step(*columns[0], rate, scale)[0]
        router = model.feed_forward.router
        found.append((float(loss), router.weight.asnumpy().copy(), router.balance.shares.asnumpy().copy()))
    return found


def reference():
    """The same in float64, by formulas; a micro batch is nowhere in them."""
    weight, shares = WEIGHT.astype(np.float64), np.full(EXPERTS, 1 / EXPERTS)
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, (ids, mask) in enumerate(zip(IDS, MASKS, strict=True), 1):
        x = TABLE[ids].astype(np.float64)
        logits = x @ weight.T
        normaliser = np.log(np.exp(logits).sum(-1, keepdims=True))
        scores = np.exp(logits - normaliser)
        tokens = mask.sum(1)[:, None, None] / LENGTH / mask.sum()  # what each token of a row counts for
        balance = BALANCE * EXPERTS * (tokens * scores * shares).sum()
        loss = balance + Z_LOSS * (tokens * normaliser**2).sum()
        of_balance = BALANCE * EXPERTS * scores * (shares - (scores * shares).sum(-1, keepdims=True))
        gradient = np.einsum("rle,rlh->eh", tokens * (of_balance + 2 * Z_LOSS * normaliser * scores), x)
        chosen = np.argsort(-logits, -1)[..., :CHOSEN]
        counts = (tokens[..., None] * np.eye(EXPERTS)[chosen]).sum((0, 1, 2))
        shares = counts / counts.sum()
        beta1, beta2 = OPTIMIZER.betas
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        root = np.sqrt(second / (1 - beta2**step)) + OPTIMIZER.eps
        weight = weight - RATE * first / (1 - beta1**step) / root
        yield loss, weight, shares


@pytest.mark.parametrize(("parts", "order"), [(1, [0, 1, 2, 3]), (2, [3, 1, 0, 2]), (4, [2, 0, 3, 1])])
def test_steps_are_those_of_the_formula_in_any_number_and_order_of_micro_batches(parts, order):
    wanted = list(reference())
    assert np.ptp(wanted[0][2]) > 0.05, "or what is told to routers would be what they begin with"
    for found, (loss, weight, shares) in zip(trained(parts, order), wanted, strict=True):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(found[1], weight, atol=1e-5)
        np.testing.assert_allclose(found[2], shares, atol=1e-6)


def state_of(engine):
    (kept,) = engine.local_state().values()
    return {name: np.array(item) for name, item in {**kept.weights, **kept.optimizer}.items()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []


def test_a_resumed_run_goes_on_with_the_choices_of_the_step_before_bit_for_bit(tmp_path):
    config = cluster_run(use_parallel=False, context={"device_target": "CPU"}, model=MIXTURE)
    run, batches = ReplicaEngine(config), [batch(config, seed) for seed in range(2)]
    run.step(batches[0], 1e-2, 1.0)
    checkpoint = load_checkpoint(
        CheckpointStore(tmp_path, keep_checkpoint_max=1).save(1, run.local_state(), {"step": 1})
    )
    shares = {name: np.array(item) for name, item in checkpoint.optimizer.items() if name.endswith(SHARES)}
    assert set(shares) == {f"model.layers.0.{SHARES}"}, "and not among the weights"
    (share,) = shares.values()
    assert share.sum() == pytest.approx(1)
    assert np.ptp(share) > 0.01
    resumed, before = ReplicaEngine(config), state_of(run)
    resumed.load(checkpoint)
    assert resumed.step(batches[1], 1e-2, float(np.finfo(np.float32).max)).overflow
    assert_equal(state_of(resumed), before)  # a step that is skipped tells routers nothing
    wanted = run.step(batches[1], 1e-2, 1.0)
    assert resumed.step(batches[1], 1e-2, 1.0) == wanted
    assert_equal(state_of(resumed), state_of(run))
    resumed.load(checkpoint)
    resumed.load_state({name: np.full_like(share, 1 / 4) for name in shares})
    assert resumed.step(batches[1], 1e-2, 1.0).loss != wanted.loss, "a run that forgets them computes something else"
