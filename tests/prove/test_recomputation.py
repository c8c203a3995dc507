"""Recomputation that saves nothing is refuted at its question: here a pattern that names no operator of the model."""

from __future__ import annotations

from markdown_pages import ROOT
from small_cluster import cluster_run

from mindllm.config import load_config
from mindllm.parallel.stages import stages_of
from mindllm.prove.answers import Standing
from mindllm.prove.checks import graphs
from mindllm.prove.pieces import Options
from mindllm.terminal.progress import unwatched


def test_a_pattern_that_matches_nothing_is_refuted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = cluster_run(dp=2, recompute_config={"recompute": False, "select_recompute": ["feed_forward\\.sliu"]})
    saving, exchanges, conformance = graphs.answers(config, Options(), unwatched)
    assert (saving.question, saving.standing) == ("recomputation", Standing.REFUTED)
    (finding,) = saving.findings
    assert finding.key == "recompute_config.select_recompute"
    assert "matches no operator" in finding.message
    assert exchanges.standing is conformance.standing is Standing.NOT_PROVED


def test_the_stages_of_every_form_become_small_runs_that_load():
    """Schedules differ in how few micro-batches they take: a V has two for each stage."""
    for form in (ROOT / "mindllm" / "verify" / "forms").glob("*.yaml"):
        config = load_config(form)
        for stage in graphs.chosen_stages(stages_of(config)):
            small, _ = graphs.with_each_kind(config, stage)
            assert small.parallel_config.micro_batch_num <= config.parallel_config.micro_batch_num, form
