"""docs/tutorials/first_proof.md: what takes seconds is done as it stands there, and prints what stands there."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_pages import ROOT, blocks

from mindllm.command import run_command
from mindllm.main import main

PAGE = ROOT / "docs" / "tutorials" / "first_proof.md"
TAKES_MINUTES = "--allow"  # in the commands that prove to the end


def plain(text):
    """Return text without the breaks and the spaces by which tables differ from one terminal to another."""
    return re.sub(r"\s+", " ", text)


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Runs a command in a directory with the examples, and returns its exit code and everything it said."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)  # nobody looks: tables are as wide as they need

    def call(words):
        if words[0] != "mindllm":
            assert words[0] == "printf"
            with Path(words[-1]).open("a", encoding="utf-8") as file:
                subprocess.run(words[:-2], stdout=file, check=True)
            return 0, ""
        with pytest.raises(SystemExit) as left:
            run_command(main, words[1:])
        shown = capsys.readouterr()
        return left.value.code, shown.out + shown.err

    return call


def steps():
    """Yield the commands of each block of bash, and the lines that the block behind it shows."""
    for block, after in pairwise(blocks(PAGE)):
        if block.language == "bash":
            shown = [] if after.language else [line for line in after.text.splitlines() if line != "…"]
            yield block.commands(), shown


def test_the_quick_commands_print_what_the_page_shows(said):
    codes = []
    for commands, shown in steps():
        if any(TAKES_MINUTES in words for words in commands):
            continue
        done = [said(words) for words in commands]
        printed = plain(" ".join(text for _, text in done))
        for line in shown:
            for part in line.split("…"):
                assert plain(part).strip() in printed, line
        codes.append([code for code, _ in done])
    assert codes == [[1], [0, 0, 0], [1]]
