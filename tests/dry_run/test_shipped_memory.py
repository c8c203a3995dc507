"""What is shipped fits the devices that it names, by the formula that prunes strategies."""

from __future__ import annotations

import pytest

from mindllm.config import load_config
from mindllm.strategies.search import evaluate_current
from mindllm.timing.device import DEFAULT, read_device
from mindllm.units import GIB
from toolkit.benchmark.tune_shipped import SHIPPED

DEVICE = read_device(DEFAULT)
NAMES = sorted(
    f"{path.parent.name}/{path.stem}" for path in set(SHIPPED.glob("*/*.yaml")) - set(SHIPPED.glob("base/*"))
)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_strategy_fits_its_devices(name):
    config = load_config(SHIPPED / f"{name}.yaml")
    assert (
        max(evaluate_current(config, DEVICE).memory) <= float(config.context.max_device_memory.removesuffix("GB")) * GIB
    )
