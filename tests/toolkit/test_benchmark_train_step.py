"""The benchmark of a training step compares the same training: PyTorch's losses are ours. Its mistakes are told early."""

import json

import pytest

from mindllm.errors import UserError
from toolkit.benchmark.train_step import main
from toolkit.benchmark.workers.train_step import WARM_UP_STEPS

pytest.importorskip("torch")


@pytest.mark.slow
def test_both_sides_train_alike_and_the_page_says_how(tmp_path, capsys):
    small = ["--model", "4x256", "--seq", "32", "--batch", "2", "--kv_heads", "2", "--steps", "2", "--rounds", "2"]
    sides = ["--sides", "torch_eager", "torch_products", "mindllm_unfused"]
    files = ["--json", str(tmp_path / "steps.json"), "--markdown", str(tmp_path / "steps.md")]
    assert main([*small, *sides, *files]) == 0
    (report,) = json.loads((tmp_path / "steps.json").read_text())
    ours, eager, products = report["sides"]
    assert [side["name"] for side in report["sides"]] == ["mindllm_unfused", "torch_eager", "torch_products"]
    assert len(ours["losses"]) == 3 * (2 + WARM_UP_STEPS)
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert ours["losses"][-1] < ours["losses"][0]
    assert eager["ratio"] == [1.0, 1.0]
    assert products["losses"] == []
    assert "mindllm_unfused" in capsys.readouterr().out
    assert "python -m toolkit.benchmark.train_step --model 4x256" in (tmp_path / "steps.md").read_text()


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--sides", "torch_eager"]])
def test_mistakes_are_told_before_anything_runs(wrong):
    with pytest.raises(UserError, match=wrong[0]):
        main(wrong)
