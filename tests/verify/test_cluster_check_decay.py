"""The decay that is found in an update is the one that was applied."""

import numpy as np
import pytest

from mindllm.architecture.optimizer_state import MOMENT_PREFIXES, POWERS
from mindllm.config import OptimizerConfig
from mindllm.verify.side import Updates

RATE = 1e-2


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_decay_is_what_moments_do_not_explain(corrects, decay):
    random = np.random.default_rng(1)
    optimizer = OptimizerConfig(bias_correction=corrects)
    old, gradient = random.normal(size=(2, 6, 4)).astype(np.float32)
    beta1, beta2 = optimizer.betas
    first, second = (1 - beta1) * gradient, (1 - beta2) * gradient**2
    powers = (beta1, beta2)
    part1, part2 = (1 - beta1, 1 - beta2) if corrects else (1.0, 1.0)
    step = (first / part1) / (np.sqrt(second / part2) + optimizer.eps) + decay * old
    after = {
        "w": old - RATE * step,
        **{f"{prefix}w": moment for prefix, moment in zip(MOMENT_PREFIXES, (first, second), strict=True)},
        **{name: np.float32(power) for name, power in zip(POWERS, powers, strict=True)},
    }
    assert Updates(optimizer, lambda name: RATE, {"w": old}, after).decays["w"] == pytest.approx(decay, abs=1e-4)
