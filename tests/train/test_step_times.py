"""A rank that is slow several times in a row is named; one late step is not."""

from dataclasses import dataclass, field

import pytest

from mindllm.train.job.ranks import Ranks
from mindllm.train.trainer import StepTimes


@dataclass(frozen=True)
class OtherTimes:
    """The times of the other three of four ranks."""

    others: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])

    def sum(self, values):
        assert values[1:] == [0.0] * len(self.others)
        return [values[0], *self.others]


@pytest.fixture
def ranks():
    return Ranks(0, 4, OtherTimes())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if "is slow" in record.getMessage()]


def test_the_slowest_is_found_each_step(ranks):
    ranks.rendezvous.others[:] = [1.0, 1.4, 1.0]
    found = StepTimes(ranks, 1.5).compare(1, 1.0)
    assert (found.rank, found.seconds, found.median) == (2, 1.4, 1.0)


def test_a_rank_is_named_at_its_third_slow_step_in_a_row(ranks, caplog):
    times = StepTimes(ranks, 1.5)
    for step in range(1, 6):
        ranks.rendezvous.others[:] = [1.0, 1.0, 1.6]
        times.compare(step, 1.0)
        assert len(warnings(caplog)) == (step >= 3)
    assert "rank 3 is slow: step 3 took 1.600 s, median of all ranks 1.000 s" in warnings(caplog)[0]


def test_late_steps_between_others_are_not_named(ranks, caplog):
    times = StepTimes(ranks, 1.5)
    for step in range(12):
        ranks.rendezvous.others[:] = [1.0, 1.0, 1.0 if step % 3 == 2 else 9.0]
        times.compare(step, 1.0)
    assert not warnings(caplog)


def test_a_simulated_rank_is_not_compared_with_ranks_that_do_not_exist(caplog):
    times = StepTimes(Ranks(2, 4, simulated=True), 1.5)
    found = [times.compare(step, 1.0) for step in range(5)]
    assert {(one.rank, one.seconds, one.median) for one in found} == {(2, 1.0, 1.0)}
    assert not warnings(caplog)


def test_of_two_ranks_the_slow_one_is_found(caplog):
    ranks = Ranks(0, 2, OtherTimes([2.0]))
    times = StepTimes(ranks, 1.5)
    for step in range(3):
        times.compare(step, 1.0)
    assert "rank 1 is slow" in warnings(caplog)[0]
