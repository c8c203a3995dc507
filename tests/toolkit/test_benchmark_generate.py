"""The generation benchmark measures both sides and writes what it measured."""

import json

import pytest

from mindllm.errors import UserError
from toolkit.benchmark.generate import main

SMALL = ["--hidden=32", "--layers=1", "--intermediate=64", "--vocab=50", "--prompt=3", "--new=5", "--threads=1"]


@pytest.mark.slow
def test_both_sides_write_the_tokens_asked_for(tmp_path):
    pytest.importorskip("transformers")
    page, file = tmp_path / "page.md", tmp_path / "rounds.json"
    assert main([*SMALL, "--batch", "1", "3", "--rounds=2", f"--markdown={page}", f"--json={file}"]) == 0
    results = json.loads(file.read_text())
    assert [result["batch"] for result in results] == [1, 3]
    for result in results:
        assert len(result["ratio"]) == len(result["mindllm"]) == len(result["transformers"]) == 2
        assert min(result["mindllm"] + result["transformers"]) > 0
    assert "python -m toolkit.benchmark.generate --hidden=32" in page.read_text()
    assert page.read_text().count("\n| ") == 4


@pytest.mark.parametrize("wrong", ["--rounds=0", "--hidden=48", "--new=0"])
def test_sizes_that_mean_nothing_are_refused(wrong):
    with pytest.raises(UserError, match="at least 1"):
        main([*SMALL, wrong])
