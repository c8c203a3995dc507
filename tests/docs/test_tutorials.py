"""Tutorials are done as they stand, and print what stands there: what takes seconds always, all of them in the slow suite."""

from __future__ import annotations

import pytest
from markdown_pages import ROOT
from page_commands import follow, in_a_shell, steps

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


def names(step, words):
    """Whether a command of a step has one of these words."""
    return any(word in command.split() for command in step.commands for word in words)


def done(page, run, only_quick=False):
    """Do the steps of a page, hold what they print against the page, and return their exit codes."""
    every = [step for step in steps(TUTORIALS / f"{page}.md") if not (only_quick and names(step, TAKES_LONGER[page]))]
    return [follow(step, run, figures=not names(step, SEARCHED)) for step in every]


@pytest.mark.parametrize("page", QUICK)
def test_the_quick_commands_print_what_the_page_shows(page, here):
    assert done(page, here, only_quick=True) == QUICK[page]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", ALL)
def test_all_commands_print_what_the_page_shows(page, place):
    """Seconds of the clock are not compared."""
    assert done(page, in_a_shell) == ALL[page]
