"""Every slow-down that is planted in a profile is found, with its size; nothing else is."""

import pytest
from profile_maker import Maker, Plants

from mindllm.profiles.compare import compare
from mindllm.profiles.directories import read_recording

NEAR = 0.1  # of a planted size
SLOW = "feed_forward.w2.matmul"


def found(step, plants, directory, ranks=None):
    maker = Maker(step, plants)
    records, _ = read_recording(maker.write(directory, ranks))
    return maker, compare(step, records)


def causes(comparison):
    return {one.cause for one in comparison.findings if not one.consequence}


def worth(comparison, cause):
    return sum(one.worth for one in comparison.findings if one.cause == cause)


def test_nothing_planted_is_nothing_found(step, tmp_path):
    maker, comparison = found(step, Plants(), tmp_path)
    assert maker.seconds == pytest.approx(step.seconds)
    assert comparison.findings == ()
    assert comparison.measured == pytest.approx(step.seconds, rel=1e-4)
    assert abs(comparison.unexplained) < 1e-4 * step.seconds


PLANTS = {
    "kernel": Plants(kernels={SLOW: 2.0}),
    "exchange": Plants(exchanges={("AllReduce", "tp"): 3.0}),
    "exposed": Plants(hidden=0.0),
    "host": Plants(host=0.3),
    "begin": Plants(begins=0.5),
    "data": Plants(fetches=0.2),
    "unknown": Plants(unknown=0.1),
}


@pytest.mark.parametrize("cause", PLANTS)
def test_what_is_planted_is_found_with_its_size(step, tmp_path, cause):
    maker, comparison = found(step, PLANTS[cause], tmp_path)
    assert maker.seconds > 1.02 * step.seconds, "it is worth something"
    assert causes(comparison) == {cause}
    assert worth(comparison, cause) == pytest.approx(maker.seconds - step.seconds, rel=NEAR)
    assert abs(comparison.unexplained) < 0.002 * step.seconds


def test_a_slow_kernel_is_named_with_its_shape_and_operator(step, tmp_path):
    _, comparison = found(step, PLANTS["kernel"], tmp_path)
    first = comparison.findings[0]
    assert first.what == 'MatMulV3 "4096,6912;6912,5120" bfloat16'
    assert SLOW in first.detail["operators"]
    assert first.detail["median"] == pytest.approx(1.5 * first.detail["roofline"], rel=0.01)


def test_a_slow_rank_is_named_and_what_the_others_wait_for_is_not_counted_twice(step, tmp_path):
    maker, comparison = found(step, Plants(ranks={2: 1.3}), tmp_path)
    assert causes(comparison) == {"imbalance"}
    late = next(one for one in comparison.findings if one.cause == "imbalance")
    assert (late.detail["rank"], late.where) == (2, "stage 0")
    computing = comparison.predicted.parts(0)["computing"]
    assert late.seconds == pytest.approx(0.3 * computing, rel=NEAR)
    assert late.worth == pytest.approx(maker.seconds - step.seconds, rel=NEAR)


def test_a_rank_alone_says_that_others_come_late(step, tmp_path):
    _, comparison = found(step, Plants(ranks={2: 1.3}), tmp_path, ranks={0})
    assert causes(comparison) == {"waits for ranks"}
    computing = comparison.predicted.parts(0)["computing"]
    assert comparison.findings[0].seconds == pytest.approx(0.3 * computing, rel=NEAR)


def test_a_faster_device_is_said_to_be_faster(step, tmp_path):
    maker, comparison = found(step, Plants(kernels={SLOW: 0.5}), tmp_path)
    assert causes(comparison) == {"kernel"}
    assert maker.seconds < step.seconds
    assert worth(comparison, "kernel") == pytest.approx(maker.seconds - step.seconds, rel=NEAR)


def test_several_plants_add_up_to_the_difference(step, tmp_path):
    plants = Plants(kernels={SLOW: 1.5}, exchanges={("AllReduce", "tp"): 2.0}, host=0.1, begins=0.2)
    maker, comparison = found(step, plants, tmp_path)
    assert causes(comparison) == {"kernel", "exchange", "host", "begin"}
    whole = sum(one.worth for one in comparison.findings if not one.consequence)
    assert whole == pytest.approx(maker.seconds - step.seconds, rel=NEAR)
