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


def pytest_generate_tests(metafunc):
    """Those of few enough devices; read where they are run, not whenever tests are collected."""
    read = configurations([CONFIGS], []) if metafunc.config.option.markexpr != "not slow" else []
    paths = [Path(name) for name, run in read if run.parallel_config.device_num <= LARGEST]
    metafunc.parametrize("path", [pytest.param(path, id=path.stem) for path in paths])


@pytest.mark.slow
def test_a_shipped_configuration_computes_what_one_device_does(path, graph_cache):
    outcome = check(load_config(path), Options(cache=graph_cache))
    assert outcome.ok, (outcome.problems[:3], outcome.first_difference)
