"""What routers add to the loss, once more in float64 from their logits: mistakes that one device and all ranks have alike."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops
from small_cluster import cluster_run

from mindllm import verify
from mindllm.config import load_config, override_config
from mindllm.models.experts import router as routers
from mindllm.reduced_runs.model import reduce_model
from mindllm.train import expert_loads
from mindllm.verify.recomputed.balance import balance_problems, bias_problems, share_problems
from mindllm.verify.recomputed.step_values import RouterValues
from mindllm.verify.side import shared_loss_problems, train_single

FORMS = Path(verify.__file__).parent / "forms"
ROWS, LENGTH = 3, 16
LAYER = "model.layers.1.feed_forward.router."
EVERY, GLOBAL, SOFTMAX = "balance_over_stages", "balance_of_global_batches", "experts"


def made_by(form, mistake=None):
    """What a router of ``form`` makes of random hidden states, with its weights and what the step before left."""
    config = load_config(FORMS / f"{form}.yaml")
    spec = config.model.config.architecture.layers[-1].feed_forward.router
    random, hidden = np.random.default_rng(3), 8
    weights = {
        f"{LAYER}weight": random.normal(0, 0.7, (spec.experts, hidden)),
        f"{LAYER}bias": random.normal(0, 0.2, spec.experts),
        f"{LAYER}balance.shares": random.dirichlet(np.ones(spec.experts)),
    }
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    router = routers.Router(spec, hidden, 0.02)
    router.weight.set_data(Tensor(weights[f"{LAYER}weight"]))
    if spec.bias:
        router.bias.set_data(Tensor(weights[f"{LAYER}bias"]))
    if spec.remembers_choices:
        router.balance.shares.set_data(Tensor(weights[f"{LAYER}balance.shares"]))
    if not spec.bias:
        del weights[f"{LAYER}bias"]
    if mistake is not None:
        mistake(router)
    x = random.normal(0, 1, (ROWS * LENGTH, hidden)).astype(np.float32)
    chosen, of_chosen, mask, added = (item.asnumpy() for item in router(Tensor(x), ROWS))
    logits = (x @ weights[f"{LAYER}weight"].T).reshape(1, 1, ROWS, LENGTH, -1)
    added = np.broadcast_to(added, ROWS).reshape(1, 1, ROWS)
    count = np.zeros_like(mask)
    np.put_along_axis(count, chosen, of_chosen, -1)
    return config, RouterValues(added, logits, mask.reshape(logits.shape), count.reshape(logits.shape)), weights


@pytest.mark.parametrize("form", [EVERY, GLOBAL, SOFTMAX, "balance_of_micro_batches", "prediction_layers"])
def test_a_router_without_a_mistake(form):
    assert list(balance_problems(*made_by(form))) == []


def twice(name):
    return lambda router: setattr(router.balance, name, 2 * getattr(router.balance, name))


def exchanged(name, by):
    return lambda router: setattr(router.balance, name, by)


def in_groups(name, by):
    return lambda router: setattr(router.balance.group_balance, name, by)


def as_it_is(x):
    return x


def first(x, total):
    return x


def second(x, largest):
    return largest


def worst(x, count):
    return ops.TopK()(-x, count)


def mean_of_experts(x, axis):
    return ops.ReduceMean()(x, axis)


def others_choices(self, shares, load):
    return ops.assign(shares, load)


def of_all_rows(scores, axis):
    return ops.ReduceMean()(scores, (0, 1)).reshape(1, -1).tile((ROWS, 1))


MISTAKES = {
    "a factor twice": (SOFTMAX, twice("of_sequence"), "aux_loss_types expert, about 2 times"),
    "that of all sequences twice": (EVERY, twice("of_all"), "aux_loss_types switch, about 2 times"),
    "a z-loss twice": (SOFTMAX, twice("z_loss"), "z_loss_factor, about 2 times"),
    "a z-loss without its square": (SOFTMAX, exchanged("square", as_it_is), "z_loss_factor"),
    "a z-loss of the largest logit": (SOFTMAX, exchanged("add_largest", second), "z_loss_factor"),
    "scores of all rows": (SOFTMAX, exchanged("mean_score", of_all_rows), "aux_loss_types expert"),
    "a mean over experts": (
        SOFTMAX,
        exchanged("sequence_sum", mean_of_experts),
        "aux_loss_types expert, about 0.25 times",
    ),
    "sigmoids as they are": (EVERY, exchanged("score_divide", first), "aux_loss_types"),
    "sums of groups": (
        EVERY,
        in_groups("group_mask", ops.ReduceSum()),
        "aux_loss_types device, about 2 times",
    ),
    "tokens a group is sent twice": (EVERY, in_groups("any_of_group", ops.ReduceSum()), "aux_loss_types"),
    "without the number of experts": (
        GLOBAL,
        lambda router: setattr(router.balance, "global_factor", router.balance.of_global),
        "aux_loss_types global, about 0.125 times",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_router_that_adds_something_else(name):
    form, mistake, cause = MISTAKES[name]
    (found,) = balance_problems(*made_by(form, mistake))
    assert found.startswith("the router of layer 1 adds ")
    assert cause in found


@pytest.mark.parametrize(
    ("form", "mistake"),
    [
        (EVERY, lambda router: setattr(router, "has_bias", False)),
        (EVERY, lambda router: setattr(router, "limited", False)),
        (EVERY, lambda router: setattr(router.groups, "deciding", 1)),
        (SOFTMAX, lambda router: setattr(router, "topk", worst)),
    ],
    ids=["no bias", "no groups", "the best one of a group", "the worst experts"],
)
def test_a_router_that_chooses_others(form, mistake):
    (found,) = balance_problems(*made_by(form, mistake))
    assert "tokens chose other experts in layer 1 than those with the best scores" in found


@pytest.mark.parametrize(
    ("form", "mistake"),
    [
        (SOFTMAX, lambda router: setattr(router, "renormalises", False)),
        (EVERY, lambda router: setattr(router, "scale", 1.5 * router.scale)),
        (EVERY, lambda router: setattr(router, "divide", first)),
    ],
    ids=["not divided", "another scale", "not divided by the sum"],
)
def test_experts_that_count_with_other_weights(form, mistake):
    (found,) = balance_problems(*made_by(form, mistake))
    assert found.startswith("experts of layer 1 count with other weights than their scores give: off by ")


def test_a_loss_that_nobody_adds_or_asks_for():
    config, values, weights = made_by(SOFTMAX)
    (found,) = balance_problems(config, None, weights)
    assert found == "0 routers add to the loss instead of 1 (aux_loss_factors, z_loss_factor)"
    path = "model.model_config"
    nothing = override_config(config, {f"{path}.aux_loss_factors": [0.0], f"{path}.z_loss_factor": 0.0})
    (found,) = balance_problems(nothing, values, weights)
    assert found == "1 routers add to the loss instead of 0 (aux_loss_factors, z_loss_factor)"


def test_choices_that_the_next_step_is_told():
    _, values, weights = made_by(GLOBAL)
    mask = np.ones((ROWS, LENGTH), np.float32)
    mask[1, 5:] = 0
    counted = (values.choices[0, 0].mean(1) * mask.sum(1)[:, None]).sum(0)
    right = {**weights, f"{LAYER}balance.shares": (counted / counted.sum()).astype(np.float32)}
    assert list(share_problems({"loss_mask": mask}, values, right)) == []
    (found,) = share_problems({"loss_mask": mask}, values, weights)
    assert found.startswith("model.layers.1.feed_forward.router.balance.shares (aux_loss_types global): off by ")


def problems_of_single_device(**model):
    experts = {"model_type": "mixtral", "num_layers": 2, "expert_num": 4, "num_experts_chosen": 2}
    config = reduce_model(cluster_run(dp=2, model={**experts, **model}))
    reference = train_single(config, 2)
    return [problem for number in range(len(reference.tasks)) for problem in shared_loss_problems(reference, number)]


def test_a_whole_step_whose_z_loss_has_no_square(monkeypatch):
    """In every layer and step, also where a factor of the gradient hides it."""
    init = routers.Balance.__init__

    def without_square(self, spec):
        init(self, spec)
        self.square = ops.Abs()

    monkeypatch.setattr(routers.Balance, "__init__", without_square)
    found = problems_of_single_device(z_loss_factor=1e-3, aux_loss_types=["expert"], aux_loss_factors=[0.01])
    assert len(found) == 2 * 5
    assert all("z_loss_factor" in problem and problem.endswith("(on a single device too)") for problem in found)


@pytest.mark.slow
def test_a_whole_step_that_tells_the_next_one_other_choices(monkeypatch):
    monkeypatch.setattr(expert_loads.LoadShares, "construct", others_choices)
    found = problems_of_single_device(aux_loss_types=["global"], aux_loss_factors=[0.5])
    assert any("balance.shares (aux_loss_types global): off by " in problem for problem in found)


@pytest.mark.parametrize(
    ("rate", "loads", "said"),
    [
        (1e-3, (1.0, 2.0, 3.0, 6.0), ""),
        (1e-3, (3.0, 3.0, 3.0, 3.0), ""),
        (-1e-3, (1.0, 2.0, 3.0, 6.0), "off by 2.00e-03"),
        (2e-3, (1.0, 2.0, 3.0, 6.0), "off by 1.00e-03"),
        (0.0, (1.0, 2.0, 3.0, 6.0), "off by 1.00e-03"),
    ],
)
def test_what_the_tokens_of_experts_make_of_their_bias(rate, loads, said):
    """By the step's own cell, with the YAML's rate and with others."""
    config = load_config(FORMS / "biases_over_stages.yaml", {"model.model_config.topk_bias_update_rate": 1e-3})
    name, before = f"{LAYER}bias", np.array([0.01, -0.02, 0.0, 0.005], np.float32)
    bias = Parameter(Tensor(before), name=name)
    expert_loads.BiasBalancing(rate)(bias, Tensor(loads, ms.float32))
    counted = {"load.model.layers.1.feed_forward.load.probe": np.array([*loads, 0.0], np.float32)}
    after = {f"{LAYER}weight": before, name: bias.asnumpy()}
    found = list(bias_problems(config, counted, {name: before}, after))
    assert len(found) == bool(said)
    assert all(said in problem and "topk_bias_update_rate 0.001" in problem for problem in found)
