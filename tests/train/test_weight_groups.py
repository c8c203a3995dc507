"""Groups of weights by pattern have their own decay, as PyTorch's parameter groups do."""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindllm import verify
from mindllm.config import load_config, override_config
from mindllm.config.optimizer import OptimizerConfig
from mindllm.errors import UserError
from mindllm.train.optimizers.adamw import AdamW

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


class Step(nn.Cell):
    """One step of an optimizer."""

    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, rate, *gradients):
        return self.optimizer(gradients, Tensor(1.0, ms.float32), rate)


def test_groups_decay_as_those_of_pytorch():
    random = np.random.default_rng(0)
    config = OptimizerConfig(weight_decay_groups=GROUPS)
    initial = [random.standard_normal(shape).astype(np.float32) for shape in NAMES.values()]
    weights = [Parameter(Tensor(value), name=name) for name, value in zip(NAMES, initial, strict=True)]
    theirs = [torch.nn.Parameter(torch.from_numpy(value.astype(np.float64))) for value in initial]
    groups = [{"params": [item], "weight_decay": decay} for item, decay in zip(theirs, DECAYS, strict=True)]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=config.eps)
    step = Step(AdamW(weights, config))
    for _ in range(4):
        gradients = [random.standard_normal(shape) for shape in NAMES.values()]
        step(Tensor(1e-2, ms.float32), *(Tensor(value, ms.float32) for value in gradients))
        for parameter, value in zip(theirs, gradients, strict=True):
            parameter.grad = torch.from_numpy(value)
        reference.step()
    for weight, parameter in zip(weights, theirs, strict=True):
        np.testing.assert_allclose(weight.asnumpy(), parameter.detach().numpy(), atol=2e-6)


def test_a_pattern_that_matches_nothing_is_refused():
    form = load_config(Path(verify.__file__).parent / "forms" / "accumulation.yaml")
    with pytest.raises(
        UserError, match=r"weight_decay_groups\[?.?0\]?.*matches no weight that is trained \(value 'nrm\*'\)"
    ):
        override_config(form, {"optimizer.weight_decay_groups": [{"params": ["nrm*"], "weight_decay": 0.0}]})
