"""How much of a device a step uses, when its peak was measured on a machine that had other work."""

import logging

import pytest

from mindllm.train.utilization import MAX_REMEASUREMENTS, Peak, peak_of


def measuring(*rates):
    """Measurements one after the other, and how many are left."""
    left = list(rates)
    return left, lambda: left.pop(0)


def test_a_peak_that_a_step_beats_is_measured_again(caplog):
    left, measure = measuring(2e9, 20e9, 40e9)
    peak = Peak(1e9, measure)
    assert peak.share(0.5e9) == 0.5
    assert peak.share(6.35e9) == pytest.approx(0.3175)
    assert left == [40e9]
    assert peak.share(5e9) == 0.25
    assert not caplog.records


def test_a_step_that_beats_every_measurement_is_told_once(caplog):
    left, measure = measuring(*[1e9] * (MAX_REMEASUREMENTS + 2))
    peak = Peak(1e9, measure)
    with caplog.at_level(logging.WARNING):
        assert [peak.share(6.35e9) for _ in range(3)] == [6.35] * 3
    assert len(left) == 2
    (record,) = caplog.records
    assert "mfu 635% is above 100%" in record.getMessage()


def test_a_peak_of_a_data_sheet_stands(caplog):
    with caplog.at_level(logging.WARNING):
        assert Peak(376e12).share(400e12) > 1
    assert "(data sheet) is too low" in caplog.text


def test_a_simulation_says_nothing_of_a_device(caplog):
    """Its steps compute nothing, and take as long as the host does."""
    with caplog.at_level("WARNING"):
        assert peak_of("Ascend", simulated=True).share(1e18) > 1
        assert caplog.records == []
        peak_of("Ascend").share(1e18)
    assert "is above 100%" in caplog.text
