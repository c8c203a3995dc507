"""AdamW is PyTorch's, with and without graph-kernel fusion."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindllm.config.optimizer import OptimizerConfig
from mindllm.train.optimizers.adamw import AdamW

torch = pytest.importorskip("torch")

SHAPES = ((8, 16), (16,), (33, 7))
STEPS = 6
COEFFICIENT = 0.5


class Step(nn.Cell):
    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, rate, *gradients):
        return self.optimizer(gradients, Tensor(COEFFICIENT, ms.float32), rate)


@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"weight_decay": 0.0}, {"betas": (0.8, 0.99)}])
def test_equals_pytorch(options):
    config = OptimizerConfig(**options)
    random = np.random.default_rng(0)
    initial = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    weights = [Parameter(Tensor(value), name=f"weight{index}") for index, value in enumerate(initial)]
    step = Step(AdamW(weights, config))
    expected = [torch.nn.Parameter(torch.from_numpy(value.astype(np.float64))) for value in initial]
    reference = torch_adamw(expected, config)
    for count in range(STEPS):
        rate = 1e-2 * (count + 1) / STEPS
        gradients = [random.standard_normal(shape) * 10.0 ** random.integers(-6, 1) for shape in SHAPES]
        step(Tensor(rate, ms.float32), *(Tensor(value, ms.float32) for value in gradients))
        for parameter, value in zip(expected, gradients, strict=True):
            parameter.grad = torch.from_numpy(value * COEFFICIENT)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        for weight, parameter in zip(weights, expected, strict=True):
            np.testing.assert_allclose(weight.asnumpy(), parameter.detach().numpy(), atol=2e-6)
    assert_state_equals(step.optimizer, reference, expected)


def test_without_bias_correction_it_is_mindspores_adam_weight_decay():
    random = np.random.default_rng(1)
    initial = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    config = OptimizerConfig(bias_correction=False, eps=1e-6, betas=(0.9, 0.999), weight_decay=0.1)
    ours = [Parameter(Tensor(value), name=f"weight{index}") for index, value in enumerate(initial)]
    theirs = [Parameter(Tensor(value), name=f"their{index}") for index, value in enumerate(initial)]
    groups = [
        {"params": [item for item in theirs if item.ndim > 1], "weight_decay": 0.1},
        {"params": [item for item in theirs if item.ndim == 1], "weight_decay": 0.0},
        {"order_params": theirs},
    ]
    reference = nn.AdamWeightDecay(groups, learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-6)
    step = Step(AdamW(ours, config))
    for _ in range(STEPS):
        gradients = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        step(Tensor(1e-2, ms.float32), *map(Tensor, gradients))
        reference(tuple(Tensor(value * COEFFICIENT) for value in gradients))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.asnumpy(), other.asnumpy(), atol=2e-6)


def torch_adamw(parameters, config):
    groups = [
        {"params": [item for item in parameters if item.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [item for item in parameters if item.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=tuple(config.betas), eps=config.eps)


def assert_state_equals(optimizer, reference, parameters):
    for index, parameter in enumerate(parameters):
        state = reference.state[parameter]
        np.testing.assert_allclose(optimizer.moments1[index].asnumpy(), state["exp_avg"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(optimizer.moments2[index].asnumpy(), state["exp_avg_sq"], rtol=1e-5, atol=1e-7)
    for power, beta in zip((optimizer.beta1_power, optimizer.beta2_power), optimizer_betas(reference), strict=True):
        assert float(power.asnumpy()) == pytest.approx(beta**STEPS, rel=1e-6)


def optimizer_betas(reference):
    return reference.param_groups[0]["betas"]


def test_an_unused_rate_changes_nothing_but_the_state():
    weight = Parameter(Tensor(np.ones((3, 4), np.float32)), name="weight")
    step = Step(AdamW([weight], OptimizerConfig()))
    step(Tensor(0.0, ms.float32), Tensor(np.full((3, 4), 2.0, np.float32)))
    np.testing.assert_array_equal(weight.asnumpy(), 1.0)
    assert step.optimizer.moments1[0].asnumpy().min() > 0


def test_equals_pytorch_with_graph_kernels(rerun_with_graph_kernels):
    rerun_with_graph_kernels(__file__, "options")
