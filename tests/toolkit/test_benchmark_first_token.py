"""The benchmark of first tokens times commands from outside, and writes what it found."""

import json

import pytest

from mindllm.errors import UserError
from toolkit.benchmark import first_token
from toolkit.benchmark.first_token import Start, main


def test_starts_of_all_sides_take_turns_and_are_told_apart(monkeypatch, tmp_path, capsys):
    asked = []

    def start(side, kept, model, prompt, tokens, directory):
        asked.append((side, kept))
        return Start(side, kept, float(len(asked)), 20.0, 9.0, 3.5, "text")

    monkeypatch.setattr(first_token, "start", start)
    page = tmp_path / "page.md"
    assert main(["--model", "there", "--rounds", "2", "--markdown", str(page)]) == 0
    once = [("mindllm", False), ("mindllm", True), ("graphs", False), ("graphs", True), ("transformers", True)]
    assert asked == once * 2
    written = page.read_text()
    assert "| mindllm in graphs | second | 6.50 (4.00–9.00) | 20.0 (20.0–20.0) |" in written
    assert "| transformers | every |" in written
    assert "python -m toolkit.benchmark.first_token --model there" in written
    capsys.readouterr()
    assert main(["--model", "there", "--rounds", "1", "--sides", "mindllm", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["starts"]) == 2


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--tokens", "1"]])
def test_what_has_no_speed_is_refused(wrong):
    with pytest.raises(UserError, match="at least"):
        main(["--model", "there", *wrong])
