"""The benchmark of two checkouts runs a verb with nothing kept, and says which figures differ."""

import pytest

from mindllm.errors import RunFailed
from toolkit.benchmark.side import ROOT
from toolkit.benchmark.two_checkouts import different, run_once

REPORT = {"fits": True, "stages": [{"used_peak_mb": 10, "gone": 1}], "seconds": {"total": 3.0}}


def test_what_differs_is_named_and_times_are_not():
    other = {"fits": True, "stages": [{"used_peak_mb": 11}], "seconds": {"total": 2.0}}
    assert different(REPORT, REPORT) == []
    assert different(REPORT, other) == ["stages[0].used_peak_mb", "stages[0].gone"]


def test_a_verb_is_run_with_nothing_kept_and_measured(tmp_path):
    kept = tmp_path / "cache" / "mindllm" / "dry_run" / "old"
    kept.parent.mkdir(parents=True)
    kept.touch()
    config = ROOT / "configs" / "llama2" / "pretrain_llama2_13b_16p.yaml"
    made = run_once(ROOT, ["time", "--config", str(config)], tmp_path)
    assert made.report
    assert min(made.processor, made.seconds, made.memory) > 0
    assert not kept.exists()


def test_a_verb_without_an_answer_is_an_error(tmp_path):
    with pytest.raises(RunFailed, match="ended with 2"):
        run_once(ROOT, ["time", "--config", "missing.yaml"], tmp_path)
