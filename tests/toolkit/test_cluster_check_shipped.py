"""Every shipped configuration of several devices, executed and held against a single device.

The richest one of eight devices every time, the others of up to sixteen where there is time; the command line checks all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mindllm.config import load_config
from toolkit.cluster_check.__main__ import configurations
from toolkit.cluster_check.check import Options, check

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALWAYS, LARGEST = "pretrain_llama2_13b_8p", 16


def shipped() -> list:
    """Those of few enough devices; all but one are slow."""
    paths = [Path(name) for name, run in configurations([CONFIGS], []) if run.parallel_config.device_num <= LARGEST]
    return [pytest.param(path, id=path.stem, marks=[] if path.stem == ALWAYS else pytest.mark.slow) for path in paths]


@pytest.mark.parametrize("path", shipped())
def test_a_shipped_configuration_computes_what_one_device_does(path, graph_cache):
    outcome = check(load_config(path), Options(cache=graph_cache))
    assert outcome.ok, (outcome.problems[:3], outcome.first_difference)
