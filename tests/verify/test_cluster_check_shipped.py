"""Every shipped configuration of several devices, executed and held against a single device.

Slow, and of up to sixteen devices; the command line checks all. That they compile is shown in tests/compiled every time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mindllm.config import load_config
from mindllm.verify.check import check
from mindllm.verify.outcome import Options
from mindllm.verify.verification import configurations

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LARGEST = 16


def shipped() -> list:
    """Those of few enough devices."""
    paths = [Path(name) for name, run in configurations([CONFIGS], []) if run.parallel_config.device_num <= LARGEST]
    return [pytest.param(path, id=path.stem) for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("path", shipped())
def test_a_shipped_configuration_computes_what_one_device_does(path, graph_cache):
    outcome = check(load_config(path), Options(cache=graph_cache))
    assert outcome.ok, (outcome.problems[:3], outcome.first_difference)
