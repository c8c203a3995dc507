"""Strategies whose layers were placed and recomputed by the planner."""

from __future__ import annotations

from mindllm.config import load_config
from mindllm.timing.device import DEFAULT, read_device
from toolkit.benchmark.tune_shipped import SHIPPED
from toolkit.pipeline_balance.by_formula import ROOM
from toolkit.tune.candidates import Candidate
from toolkit.tune.judge import GB, Judged
from toolkit.tune.search import plan_best

LIMIT = 58 * GB


def test_scores_that_no_kernel_fuses_are_in_the_plan():
    """Gemma 2 9B: capped scores come back while a layer is computed again, and every rank has the whole embedding."""
    config, device = load_config(SHIPPED / "gemma" / "pretrain_gemma2_9b.yaml"), read_device(DEFAULT)
    candidates = [
        Candidate(1, 8, 1, 1, 1, 128, True, False),
        Candidate(1, 4, 2, 1, 1, 128, True, False),
    ]
    judged = [Judged(one, 0.0, (0.0,)) for one in candidates]
    found = plan_best(config, judged, device, LIMIT, len(judged), 600.0)
    assert {one.candidate for one in found} == set(candidates)
    assert all(max(one.memory) <= ROOM * LIMIT for one in found)
