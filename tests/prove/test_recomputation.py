"""Recomputation that saves nothing is refuted at its question: here a pattern that names no operator of the model."""

from __future__ import annotations

from small_cluster import cluster_run

from mindllm.prove.answers import Standing
from mindllm.prove.checks import graphs
from mindllm.prove.pieces import Options
from mindllm.terminal.progress import unwatched


def test_a_pattern_that_matches_nothing_is_refuted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = cluster_run(dp=2, recompute_config={"recompute": False, "select_recompute": ["feed_forward\\.sliu"]})
    saving, exchanges = graphs.answers(config, Options(), unwatched)
    assert (saving.question, saving.standing) == ("recomputation", Standing.REFUTED)
    (finding,) = saving.findings
    assert finding.key == "recompute_config.select_recompute"
    assert "matches no operator" in finding.message
    assert exchanges.standing is Standing.NOT_PROVED
