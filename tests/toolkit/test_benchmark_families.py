"""The benchmark of dry runs by family: every family has a run, and a report becomes a row."""

import pytest

from mindllm.config import load_config
from mindllm.families import FAMILIES, family_of
from toolkit.benchmark import dry_run_families as benchmark

KEPT = ["mistral", "mistral/pretrain_mistral_7b", 8, 1, 0, 30_000, 31_000, 59_392, 61.4]


def config_of(run):
    return load_config(benchmark.CONFIGS / f"{run}.yaml")


def test_every_family_has_one_run():
    told = [family_of(config_of(run).model.config).name for run in benchmark.RUNS]
    assert sorted(told) == sorted({*told})
    assert {family.name for family in FAMILIES} - {*told} == {"glm"}  # the same layers as glm4, less two norms


def test_the_fullest_stage_is_the_row(monkeypatch):
    run = "llama2/pretrain_llama2_7b_8p"
    stages = [{"stage": n, "used_peak_mb": used, "actual_peak_mb": used + 100} for n, used in enumerate((4000, 5000))]
    row = benchmark.row_of(run, config_of(run), {"limit_mb": 59_392, "stages": stages}, 12.34)
    assert row.cells == ("llama", "pretrain_llama2_7b_8p", "8", "2", "1", "4.88", "4.98", "58.00", "12")


def test_rows_that_are_kept_are_not_made_again(tmp_path, monkeypatch, capsys):
    asked = []

    def told(run, config):
        asked.append(run)
        return benchmark.Row(*KEPT)

    monkeypatch.setattr(benchmark, "dry_run", told)
    kept, page = tmp_path / "rows.json", tmp_path / "page.md"
    options = ["--only", "mistral", "--keep", str(kept), "--markdown", str(page)]
    assert benchmark.main(options) == 0
    assert benchmark.main(options) == 0
    assert asked == ["mistral/pretrain_mistral_7b"]
    assert "| mistral | pretrain_mistral_7b | 8 | 1 | 0 | 29.30 | 30.27 | 58.00 | 61 |" in page.read_text()
    assert "pretrain_mistral_7b" in capsys.readouterr().out


def test_a_family_that_is_none_is_refused():
    with pytest.raises(benchmark.UserError, match="valid families: llama"):
        benchmark.main(["--only", "falcon"])
