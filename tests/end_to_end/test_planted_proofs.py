"""Mistakes planted into the shardings of a model, through ``mindllm prove``: refuted at the right question, with their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.config import render_config

ROOT = Path(__file__).parents[2]
PLANTED = """
import mindllm.parallel.build as build
from mindllm.parallel.sharding import on
table = build.sharding_table
build.sharding_table = lambda *model: table(*model) | {{"model.layers.0.{operator}": {layouts}}}
"""
ROWS = '("dp", None)'  # of hidden states, which sequence parallelism cuts over tp as well
WHOLE = f"on({ROWS}, (None, None))"
GATHERED = f"on({ROWS}, {ROWS})"
WIDE = {"hidden_size": 2048, "seq_length": 2048, "intermediate_size": 4096, "num_heads": 16, "n_kv_heads": 8}
"""Large enough that one exchange is a hundredth of a step."""


@pytest.fixture
def proved(tmp_path, monkeypatch):
    """Answers of a proof, by question, where a layout of an operator of the first layer is another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))

    def prove(operator, layouts):
        (tmp_path / "sitecustomize.py").write_text(PLANTED.format(operator=operator, layouts=layouts))
        config = cluster_run(dp=2, tp=2, model=WIDE, use_seq_parallel=True)
        (tmp_path / "run.yaml").write_text(render_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "mindllm.main", "prove", "run.yaml", "--allow", "data", "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 3, done.stderr
        return {answer["question"]: answer for answer in json.loads(done.stdout)["answers"]}

    return prove


@pytest.mark.slow
def test_a_product_that_is_not_split_is_refuted_at_conformance(proved):
    """It is right on every rank, costs its weight on each of them, and exchanges nothing."""
    answers = proved("feed_forward.w1.matmul", WHOLE)
    standings = {name: answers[name]["standing"] for name in ("parity", "conformance", "communication")}
    assert standings == {"parity": "proved", "conformance": "refuted", "communication": "proved"}
    told = [finding["message"] for finding in answers["conformance"]["findings"]]
    assert any("model.layers.0.feed_forward.w1.matmul is sharded ((2, 1), (1, 1))" in message for message in told)
    assert any("model.layers.0.feed_forward.w1.weight is cut to" in text for text in told)


@pytest.mark.slow
def test_a_needless_exchange_is_refuted_at_communication(proved):
    """The sum behind the feed-forward part takes all rows, where sequence parallelism has half of them on a rank."""
    answers = proved("ffn_add", GATHERED)
    standings = {name: answers[name]["standing"] for name in ("parity", "conformance", "communication")}
    assert standings == {"parity": "proved", "conformance": "refuted", "communication": "refuted"}
    findings = answers["communication"]["findings"]
    assert any("AllGather" in finding["message"] and "ffn_add" in finding["advice"] for finding in findings)
