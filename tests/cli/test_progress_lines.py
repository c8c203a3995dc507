"""Commands that may take minutes print a line now and then where standard error is not a terminal."""

from __future__ import annotations

import time

import pytest

from mindllm.cli import check, plan
from mindllm.cli import time as step
from mindllm.terminal import console

RUN = "configs/llama2/pretrain_llama2_13b_16p.yaml"


class Slow(RuntimeError):
    """Ends a command that has taken long enough."""


def slow(*_, **__):
    time.sleep(0.3)
    raise Slow


@pytest.mark.parametrize(
    ("place", "command", "options", "line"),
    [
        ("mindllm.planning.outcome.make_plan", plan, (RUN, "--no-validate"), "planning 0/1"),
        (
            "mindllm.planning.outcome.PipelinePlan.explain",
            plan,
            (RUN, "--no-validate", "--seconds", "1", "--explain"),
            "planning again with more memory 0/1",
        ),
        (
            "mindllm.planning.outcome.PipelinePlan.draw",
            plan,
            (RUN, "--no-validate", "--seconds", "1", "--picture", "a.png"),
            "drawing a.png 0/1",
        ),
        ("mindllm.timing.prediction.predict", step, (RUN, "--explain"), "predicting the step 0/1"),
        (
            "mindllm.programs.step_time.predict_step",
            step,
            ("--simulated", "kept"),
            "reading the graphs of kept 0/1",
        ),
        ("mindllm.programs.verify.check_program", check, ("--program", "kept"), "executing the ranks of kept 0/1"),
    ],
    ids=["plan", "plan --explain", "plan --picture", "time", "time --simulated", "check --program"],
)
def test_no_phase_is_silent(place, command, options, line, monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr(place, slow)
    given = ("--config", *options) if options[0] == RUN else options
    with pytest.raises(Slow):
        command.main(list(given))
    assert f"{line}, after 0:00:0" in capsys.readouterr().err
