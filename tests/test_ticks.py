"""Ticks of axes are round, begin at 0, and stay below what is asked for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mindllm.terminal.page import STEPS, round_ticks


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (2416, [0, 500, 1000, 1500, 2000]),
        (58, [0, 20, 40]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, [0]),
        (math.inf, [0]),
    ],
)
def test_ticks_are_those_a_person_would_draw(most, ticks):
    assert round_ticks(most) == pytest.approx(ticks)


@given(some.floats(1e-6, 1e12), some.integers(2, 12))
def test_ticks_are_multiples_of_a_round_step(most, count):
    ticks = round_ticks(most, count)
    step = ticks[1]
    assert 2 <= len(ticks) <= count + 1
    assert ticks[-1] <= most * (1 + 1e-6) < ticks[-1] + step * (1 + 1e-6)
    assert any(math.isclose(step / 10 ** math.floor(math.log10(step * (1 + 1e-9))), one) for one in STEPS)
