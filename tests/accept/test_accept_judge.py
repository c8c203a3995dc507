"""Planted differences: what is as predicted is confirmed, and what is not is refuted."""

import math

import pytest
from profile_maker import Maker, Plants

from mindllm.accept.accept import recorded_lines
from mindllm.accept.claims import BY_NAME
from mindllm.accept.expected import timed
from mindllm.accept.judge import NO_DEVICE, Verdict, link_line, loss_line, peak_line, time_line, worst
from mindllm.accept.runs import SIZES, run_of
from mindllm.profiles.compare import compare
from mindllm.profiles.run import read_recording
from mindllm.timing.device import DEFAULT, read_device
from mindllm.units import MIB

LOSSES = {1: 5.5, 2: 5.4, 3: 5.3}


@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize(
    ("by", "verdict"), [(1e-2, Verdict.REFUTED), (-1e-2, Verdict.REFUTED), (math.nan, Verdict.REFUTED), (1e-6, "confirmed")]
)  # fmt: skip
def test_a_loss_that_differs_by_a_hundredth_of_a_nat_is_refuted(target, by, verdict):
    line = loss_line("dp", LOSSES, {**LOSSES, 2: 5.4 + by}, SIZES[target].loss_tolerance)
    assert line.verdict == verdict
    assert (line.predicted, line.measured) == (5.3, 5.3)


def test_a_loss_that_is_not_finite_in_the_metrics_is_refuted():
    line = loss_line("dp", LOSSES, {**LOSSES, 3: None}, 1e-4)
    assert line.verdict is Verdict.REFUTED
    assert "not finite" in line.why


def test_a_resumed_run_is_compared_in_the_steps_that_it_has():
    assert "steps 2 to 3" in loss_line("resume", LOSSES, {2: 5.4, 3: 5.3}, 1e-4).why
    assert loss_line("resume", LOSSES, {}, 1e-4).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("share", "verdict"), [(1.2, "refuted"), (1.0, "confirmed"), (1.05, "confirmed"), (0.95, "confirmed"), (0.8, "refuted")]
)  # fmt: skip
def test_a_peak_a_fifth_off_the_dry_run_is_refuted(share, verdict):
    used = 1522 * MIB
    assert peak_line("dp", used, used, round(share * used)).verdict == verdict


def test_workspace_of_kernels_may_come_on_top_of_a_peak():
    used, workspace = 820 * MIB, 1000 * MIB
    assert peak_line("pp", used, workspace, round(1.05 * workspace)).verdict is Verdict.CONFIRMED
    assert peak_line("pp", used, workspace, round(1.2 * workspace)).verdict is Verdict.REFUTED


@pytest.mark.parametrize(
    ("seconds", "error", "verdict"),
    [(1.14, 0.13, "refuted"), (0.86, 0.13, "refuted"), (1.12, 0.13, "confirmed"), (1.5, None, "not judged")],
)
def test_a_step_outside_its_range_is_refuted(seconds, error, verdict):
    assert time_line("dp", "step", 1.0, error, seconds).verdict == verdict


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.5, "refuted"), (0.9, "confirmed"), (1.2, "confirmed"), (2.0, "refuted")]
)
def test_a_link_at_half_its_bandwidth_is_refuted(share, verdict):
    assert link_line("dp", "AllReduce over dp", 20e9, share * 20e9).verdict == verdict


def test_without_a_device_nothing_but_losses_is_judged():
    lines = [peak_line("dp", 1, 1, None), time_line("dp", "step", 1.0, 0.1, None), link_line("dp", "x", 1.0, None)]
    assert {(line.verdict, line.why) for line in lines} == {(Verdict.NOT_RUN, NO_DEVICE)}


def test_a_claim_stands_as_its_worst_line():
    assert worst([Verdict.CONFIRMED, Verdict.REFUTED, Verdict.FAILED]) is Verdict.REFUTED
    assert worst([Verdict.NOT_RUN, Verdict.CONFIRMED]) is Verdict.CONFIRMED
    assert worst([]) is Verdict.NOT_RUN


def predicted_of(name, tmp_path):
    claim = BY_NAME[name]
    return timed(
        run_of(claim, claim.shape(8), SIZES["Ascend"], "Ascend", tmp_path / "c", tmp_path), read_device(DEFAULT)
    )


def judged(name, plants, tmp_path):
    """Verdicts of kernels and links, from files as MindSpore's profiler leaves them on a device."""
    predicted = predicted_of(name, tmp_path)
    records, _ = read_recording(Maker(predicted.step, plants).write(tmp_path / "profile"))
    lines = recorded_lines(name, predicted, compare(predicted.step, records), True)
    return {line.figure: line for line in lines}


@pytest.mark.parametrize("name", ["single", "dp", "tp", "pp", "ep", "optimizer", "recompute"])
def test_a_recording_that_is_as_predicted_is_confirmed(name, tmp_path):
    found = judged(name, Plants(), tmp_path)
    assert {figure: line.verdict.value for figure, line in found.items()} == dict.fromkeys(found, "confirmed")
    assert (len(found) > 1) == (name not in ("single", "recompute", "pp"))


def test_a_recorded_exchange_of_twice_the_time_is_a_link_at_half_its_bandwidth(tmp_path):
    found = judged("dp", Plants(exchanges={("AllReduce", "dp"): 2.0}), tmp_path)
    line = found["bandwidth of AllReduce over dp"]
    assert line.verdict is Verdict.REFUTED
    assert line.measured == pytest.approx(line.predicted / 2, rel=0.01)
    assert found["kernels"].verdict is Verdict.CONFIRMED


def test_kernels_of_twice_the_time_are_refuted(tmp_path):
    found = judged("single", Plants(ranks={0: 2.0}), tmp_path)
    assert found["kernels"].verdict is Verdict.REFUTED


def test_a_device_without_a_recording_has_failed_lines(tmp_path):
    lines = recorded_lines("dp", predicted_of("dp", tmp_path), None, True)
    assert {line.verdict for line in lines} == {Verdict.FAILED}
