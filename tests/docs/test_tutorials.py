"""Tutorials are done as they stand, and print what stands there: what takes seconds always, all of them in the slow suite."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from how_to_files import chat_model
from markdown_pages import ROOT
from page_commands import Step, follow, in_a_shell, steps

TUTORIALS = ROOT / "docs" / "tutorials"
TAKES_LONGER = {
    "first_proof": ("--allow",),  # in the commands that prove to the end
    "plan_70b": ("configure", "time", "dry-run"),
    "memory_page": ("dry-run",),
    "cluster_on_a_laptop": ("data", "train", "weights"),
}
SEARCHED = ("configure", "run.yaml")  # in commands whose figures depend on how far a search comes in its seconds
TUNED = ("finetune",)  # in commands whose figures are of the page's model; a tiny one is tuned here
ASKED = ("chat",)  # in commands that answer what is typed
QUESTION = "What is a tuple?"
ANSWERED = ["Write a message. …", "prefill: …; decode: … tokens"]  # before and behind an answer
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


def one_step(step, run):
    """Do a step, hold what it prints against the page, and return its exit codes."""
    if names(step, ASKED):
        assert step.shown[:1] in ([], [QUESTION])
        return follow(Step(step.commands, ANSWERED), partial(run, typed=f"{QUESTION}\nq\n"))
    return follow(step, run, figures=not names(step, (*SEARCHED, *TUNED)))


def done(page, run, only_quick=False):
    """Do the steps of a page, and return their exit codes."""
    left_out = TAKES_LONGER[page] if only_quick else ()
    return [one_step(step, run) for step in steps(TUTORIALS / f"{page}.md") if not names(step, left_out)]


@pytest.mark.parametrize("page", QUICK)
def test_the_quick_commands_print_what_the_page_shows(page, here):
    assert done(page, here, only_quick=True) == QUICK[page]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", ALL)
def test_all_commands_print_what_the_page_shows(page, place):
    """Seconds of the clock are not compared."""
    assert done(page, in_a_shell) == ALL[page]


@pytest.mark.slow
def test_a_model_is_tuned_as_the_page_does(place, hub):
    """The hub has a tiny model by the name of the page's: its figures and its words are its own."""
    from transformers import AutoModelForCausalLM

    chat_model("served")
    hub("served")
    assert done("finetune_on_a_laptop", in_a_shell) == [[0, 0], [0], [0], [0], [0, 0], [0]]
    assert losses_of("output/python") == losses_of("output/python_again") != []
    assert str(AutoModelForCausalLM.from_pretrained("models/python", dtype="auto").dtype) == "torch.bfloat16"


def losses_of(run):
    """Return the loss of each step of a run."""
    return [json.loads(line).get("loss") for line in Path(run, "metrics.jsonl").read_text().splitlines()]
