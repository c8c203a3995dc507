"""Strategies whose layers were placed and recomputed by the planner."""

from __future__ import annotations

from mindllm.config import load_config
from mindllm.timing.device import DEFAULT, read_device
from toolkit.benchmark.tune_shipped import SHIPPED
from toolkit.tune.candidates import Candidate
from toolkit.tune.judge import GB, Judged
from toolkit.tune.search import plan_best

LIMIT = 58 * GB


def test_a_plan_over_the_limit_is_not_offered():
    """Scores of Gemma 2 that no kernel fuses are there while a layer is computed again, which the planner does not count."""
    config, device = load_config(SHIPPED / "gemma" / "pretrain_gemma2_9b.yaml"), read_device(DEFAULT)
    candidates = [
        Candidate(1, 8, 1, 1, 1, 128, True, False),
        Candidate(1, 4, 2, 1, 1, 128, True, False),
    ]
    judged = [Judged(one, 0.0, (0.0,)) for one in candidates]
    found = plan_best(config, judged, device, LIMIT, len(judged), 2.0)
    assert candidates[0] not in [one.candidate for one in found]
    assert all(max(one.memory) <= LIMIT for one in found)
