"""How far an evaluation is, where there is no terminal."""

import logging

import pytest

from mindllm.evaluate import model
from mindllm.terminal import console
from mindllm.terminal.render import REMAINING, drawn


@pytest.fixture
def clock(monkeypatch):
    times = [0.0]
    monkeypatch.setattr(model.time, "monotonic", lambda: times[0])
    return times


def test_the_log_says_once_a_minute_how_far_it_is_and_how_long_it_takes(clock, caplog):
    caplog.set_level(logging.INFO, "mindllm")
    told = model.LoggedProgress()
    told("scoring", 0, 100)
    clock[0] = 500  # of compiling
    for done in range(1, 12):
        clock[0] += 13
        told("scoring", done, 100)
    told("writing", 0, 3)  # another time counts
    told("writing", 1, 3)
    assert [record.message for record in caplog.records] == [
        "scoring: 6 of 100 answers, about 0:20:22 left",
        "scoring: 11 of 100 answers, about 0:19:17 left",
    ]


def test_the_command_says_it_on_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.02)
    shown = ""
    with drawn(*REMAINING) as told:
        told("computing in float32")
        told("writing", 1, 3)
        while "writing 1/3" not in shown:
            shown += capsys.readouterr().err
    assert shown.startswith("computing in float32\n")
