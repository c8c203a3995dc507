"""How far an evaluation is, where there is no terminal."""

import logging

import pytest

from mindllm.evaluate import progress


@pytest.fixture
def clock(monkeypatch):
    times = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[0])
    return times


def test_the_log_says_once_a_minute_how_far_it_is_and_how_long_it_takes(clock, caplog):
    caplog.set_level(logging.INFO, "mindllm")
    answer = progress.logged("loglikelihood", 100)
    for _ in range(10):
        clock[0] += 13
        answer()
    assert [record.message for record in caplog.records] == [
        "scoring: 5 of 100 answers, about 0:20:35 left",
        "scoring: 10 of 100 answers, about 0:19:30 left",
    ]


def test_only_the_first_of_several_processes_says_so(clock, caplog):
    caplog.set_level(logging.INFO, "mindllm")
    for shown, count in ((False, 0), (True, 1)):
        with progress.watched(shown) as watch:
            answer = watch("generate_until", 3)
            clock[0] += 61
            answer()
        assert len(caplog.records) == count
