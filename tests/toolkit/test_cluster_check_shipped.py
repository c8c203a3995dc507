"""Every shipped configuration of several devices, executed and held against a single device: minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindllm.config import load_config
from toolkit.cluster_check.check import Options, check

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL, LARGE = 8, 16


def shipped() -> list[Path]:
    """Those of few enough devices for this; the command line checks larger ones."""
    paths = [path for path in sorted(CONFIGS.glob("*/*.yaml")) if path.parent.name != "base"]
    return [path for path in paths if SMALL <= load_config(path).parallel_config.device_num <= LARGE]


@pytest.mark.slow
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_a_shipped_configuration_computes_what_one_device_does(path, graph_cache):
    outcome = check(load_config(path), Options(cache=graph_cache))
    assert outcome.ok, outcome.problems
