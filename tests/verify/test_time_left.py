"""About how long the ranks take that are still to be compiled."""

from __future__ import annotations

from mindllm.verify.check import RemainingTime


def test_what_went_before_the_first_rank_is_no_measure():
    left = RemainingTime()
    assert left.text(0, 16, 0.0) == ""
    assert left.text(1, 16, 200.0) == ""  # cores were simulating stages
    assert left.text(2, 16, 210.0) == ", about 2 min left"  # 14 ranks of 10 s
    assert left.text(2, 16, 300.0) == ""  # nearly all of that has passed


def test_the_last_ranks_count():
    left, slow = RemainingTime(), 100.0
    for done in range(1, 5):
        left.text(done, 64, slow * done)
    assert left.text(5, 64, slow * 5) == ", about 98 min left"
    for done in range(6, 14):
        left.text(done, 64, 500.0 + done)
    assert left.text(14, 64, 514.0) == ""  # 50 ranks of a second
