"""How far an evaluation is, where there is no terminal."""

import logging

import pytest

from mindllm.evaluate import progress
from mindllm.terminal import console


@pytest.fixture
def clock(monkeypatch):
    times = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[0])
    return times


def test_the_log_says_once_a_minute_how_far_it_is_and_how_long_it_takes(clock, caplog):
    caplog.set_level(logging.INFO, "mindllm")
    answer = progress.logged("loglikelihood", 100)
    clock[0] = 500  # of compiling
    for _ in range(11):
        clock[0] += 13
        answer()
    assert [record.message for record in caplog.records] == [
        "scoring: 6 of 100 answers, about 0:20:22 left",
        "scoring: 11 of 100 answers, about 0:19:17 left",
    ]


def test_only_the_first_of_several_processes_says_so(clock, caplog):
    caplog.set_level(logging.INFO, "mindllm")
    for shown, count in ((False, 0), (True, 1)):
        with progress.watched(shown) as watch:
            answer = watch("generate_until", 3)
            answer()
            clock[0] += 61
            answer()
        assert len(caplog.records) == count


def test_without_a_log_standard_error_says_so(monkeypatch, capsys, caplog):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.02)
    caplog.set_level(logging.WARNING, "mindllm")
    told = ""
    with progress.watched(True) as watch:
        watch("generate_until", 3)()
        while "writing 1/3" not in told:
            told += capsys.readouterr().err
