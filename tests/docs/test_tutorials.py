"""Tutorials are done as they stand, and print what stands there: what takes seconds always, all of them in the slow suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_pages import ROOT, blocks

from mindllm.command import run_command
from mindllm.main import main

TUTORIALS = ROOT / "docs" / "tutorials"
TAKES_LONGER = {
    "first_proof": ("--allow",),  # in the commands that prove to the end
    "plan_70b": ("configure", "time", "dry-run"),
    "memory_page": ("dry-run",),
    "cluster_on_a_laptop": ("data", "train", "weights"),
}
SEARCHED = ("configure", "run.yaml")  # in commands whose figures depend on how far a search comes in its seconds
QUICK = {"first_proof": [[1], [0, 0, 0], [1]], "plan_70b": [[0]]}
ALL = {
    "first_proof": [[1], [3], [0, 0, 0], [1], [0]],
    "plan_70b": [[0], [0], [0], [0]],
    "memory_page": [[0], [3], [0]],
    "cluster_on_a_laptop": [[0], [0], [0], [0]],
}
CLOCK = re.compile(r"…|^ *\d+\.\d s\b|\bin \d+\.\d s\b")  # what is left out, and seconds of the clock


def plain(text, figures=True):
    """Return text without the breaks and spaces by which tables differ from one terminal to another; without figures, #."""
    return re.sub(r"\s+", " ", text if figures else re.sub(r"-?\d[\d.,]*", "#", text))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with examples and configurations, and no answers that were kept before."""
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)  # nobody looks: tables are as wide as they need


@pytest.fixture
def here(place, capsys):
    """Runs a command in this process; returns its exit code and everything it said."""

    def call(words):
        if words[0] != "mindllm":
            return elsewhere(words)
        with pytest.raises(SystemExit) as left:
            run_command(main, words[1:])
        shown = capsys.readouterr()
        return left.value.code, shown.out + shown.err

    return call


def elsewhere(words):
    """Run a command in a process of its own, as MindSpore has one device each; the same answer."""
    if words[0] == "printf":
        with Path(words[-1]).open("a", encoding="utf-8") as file:
            return subprocess.run(words[:-2], stdout=file, check=True).returncode, ""
    assert words[0] == "mindllm"
    here = dict(os.environ)  # without the COLUMNS that readline, which pytest imports, leaves to child processes
    ended = subprocess.run([sys.executable, "-m", *words], env=here, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def steps(page):
    """Yield the commands of each block of bash, and the lines that the block behind it shows."""
    for block, after in pairwise(blocks(TUTORIALS / f"{page}.md")):
        if block.language == "bash":
            shown = [] if after.language else [line for line in after.text.splitlines() if line != "…"]
            yield block.commands(), shown


def done(page, said, only_quick=False):
    """Do the steps of a page, hold what they print against the page, and return their exit codes."""
    codes = []
    for commands, shown in steps(page):
        if only_quick and any(word in words for words in commands for word in TAKES_LONGER[page]):
            continue
        answers = [said(words) for words in commands]
        figures = not any(word in words for words in commands for word in SEARCHED)
        printed = plain(" ".join(text for _, text in answers), figures)
        for line in shown:
            for part in CLOCK.split(line):
                assert plain(part, figures).strip() in printed, (
                    f"{line}\nis not in\n{''.join(text for _, text in answers)}"
                )
        codes.append([code for code, _ in answers])
    return codes


@pytest.mark.parametrize("page", QUICK)
def test_the_quick_commands_print_what_the_page_shows(page, here):
    assert done(page, here, only_quick=True) == QUICK[page]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", ALL)
def test_all_commands_print_what_the_page_shows(page, place):
    """Seconds of the clock are not compared."""
    assert done(page, elsewhere) == ALL[page]
