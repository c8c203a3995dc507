"""Groups of weights by pattern have their own decay and learning rate, as PyTorch's parameter groups do."""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from test_engine import YAML as PLAIN

from mindllm import verify
from mindllm.config import load_config, override_config
from mindllm.config.optimizer import GroupedLrSchedule, OptimizerConfig
from mindllm.errors import UserError
from mindllm.train.engine import ReplicaEngine
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.optimizers.schedule import group_learning_rates

torch = pytest.importorskip("torch")

NAMES = {
    "model.tok_embeddings.embedding_weight": (9, 4),
    "model.layers.0.w": (4, 5),
    "norm.weight": (4,),
    "lm_head.weight": (9, 4),
}
GROUPS = [
    {"params": ["*embed*", "lm_head.*"], "weight_decay": 0.0},
    {"params": ["*norm*", "lm_head.weight"], "weight_decay": 0.3},
]
DECAYS = (0.0, 0.1, 0.3, 0.0)  # of the names above, in their order


YAML = f"""{PLAIN}
grouped_lr_schedule:
  grouped:
    - {{type: LinearWithWarmUpLR, learning_rate: 1e-3, warmup_steps: 2, params: ["*embed*", lm_head.weight]}}
"""


def batch():
    """Four rows of random tokens."""
    tokens = np.random.default_rng(0).integers(0, 61, (4, 9)).astype(np.int32)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones((4, 8), np.float32)}


class Step(nn.Cell):
    """One step of an optimizer; with groups their rates are given first."""

    def __init__(self, optimizer, grouped):
        super().__init__(auto_prefix=False)
        self.optimizer, self.grouped = optimizer, grouped

    def construct(self, *inputs):
        if self.grouped:
            return self.optimizer(inputs[3:], Tensor(1.0, ms.float32), inputs[:3])
        return self.optimizer(inputs[1:], Tensor(1.0, ms.float32), inputs[0])


RATED = {
    "grouped": [
        {"type": "ConstantWarmUpLR", "learning_rate": 1.0, "params": ["*norm*"]},
        {"type": "LinearWithWarmUpLR", "learning_rate": 1.0, "params": ["*.weight"]},
    ]
}
RATES = (1e-2, 3e-2, 2e-3)  # of weights without a group, and of the groups
GROUP_OF = (0, 0, 1, 2)


@pytest.mark.parametrize("grouped", [False, True], ids=["decays", "rates too"])
def test_groups_are_updated_as_those_of_pytorch(grouped):
    random = np.random.default_rng(0)
    config = OptimizerConfig(weight_decay_groups=GROUPS)
    initial = [random.standard_normal(shape).astype(np.float32) for shape in NAMES.values()]
    weights = [Parameter(Tensor(value), name=name) for name, value in zip(NAMES, initial, strict=True)]
    theirs = [torch.nn.Parameter(torch.from_numpy(value.astype(np.float64))) for value in initial]
    rates = [RATES[number * grouped] for number in GROUP_OF]
    groups = [
        {"params": [item], "weight_decay": decay, "lr": rate}
        for item, decay, rate in zip(theirs, DECAYS, rates, strict=True)
    ]
    reference = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    step = Step(AdamW(weights, config, groups=GroupedLrSchedule(**RATED) if grouped else None), grouped)
    for _ in range(4):
        gradients = [random.standard_normal(shape) for shape in NAMES.values()]
        given = (*RATES[: 3 if grouped else 1], *gradients)
        step(*(Tensor(value, ms.float32) for value in given))
        for parameter, value in zip(theirs, gradients, strict=True):
            parameter.grad = torch.from_numpy(value)
        reference.step()
    for weight, parameter in zip(weights, theirs, strict=True):
        np.testing.assert_allclose(weight.asnumpy(), parameter.detach().numpy(), atol=3e-6)


OPTIONS = ((), ("--runner_config.batch_size=1", "--runner_config.gradient_accumulation_steps=4"))


@pytest.mark.parametrize("options", OPTIONS, ids=["at once", "accumulated"])
@pytest.mark.parametrize("guarded", [False, True])
def test_a_group_at_rate_zero_stays(tmp_path, options, guarded):
    limits = ["--runner_wrapper.skip_spikes.window=4"] * guarded
    (tmp_path / "run.yaml").write_text(YAML)
    engine = ReplicaEngine(load_config(tmp_path / "run.yaml", (*options, *limits)))
    before = {name: item.asnumpy().copy() for name, item in engine.weights.items()}
    engine.step(batch(), 1e-2, 1.0, group_rates=(0.0,))
    unchanged = {name for name, item in engine.weights.items() if np.array_equal(before[name], item.asnumpy())}
    assert unchanged == {"model.tok_embeddings.embedding_weight", "lm_head.weight"}


def test_each_step_of_a_run_has_the_rates_of_its_groups(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    told = group_learning_rates(load_config(path).grouped_lr_schedule.grouped, 4)
    assert [told(step) for step in range(5)] == [(pytest.approx(rate),) for rate in (0.0, 5e-4, 1e-3, 5e-4, 0.0)]


def test_a_pattern_that_matches_nothing_is_refused():
    form = load_config(Path(verify.__file__).parent / "forms" / "accumulation.yaml")
    with pytest.raises(
        UserError, match=r"weight_decay_groups\[?.?0\]?.*matches no weight that is trained \(value 'nrm\*'\)"
    ):
        override_config(form, {"optimizer.weight_decay_groups": [{"params": ["nrm*"], "weight_decay": 0.0}]})


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"params": ["nrm*"], "learning_rate": 1.0}, r"params.*matches no weight"),
        ({"params": ["*norm*"]}, r"learning_rate.*this key is required"),
        ({"params": ["*norm*"], "learning_rate": 1.0, "warmup_lr_init": 2.0}, "warmup_lr_init.*above learning_rate"),
    ],
)
def test_a_group_that_cannot_be_meant_is_refused(tmp_path, group, words):
    (tmp_path / "run.yaml").write_text(YAML)
    config = load_config(tmp_path / "run.yaml")
    with pytest.raises(UserError, match=words):
        override_config(config, {"grouped_lr_schedule.grouped": [{"type": "ConstantWarmUpLR", **group}]})
