"""Learning rates of MindFormers' YAMLs: the same rate at every step as its own classes compute."""

import pytest

from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.train.optimizers.schedule import learning_rates
from tests.mindformers.mindformers_files import LEGACY, writer

STABLE = {"type": "WarmUpStableDecayLR", "learning_rate": 1e-3, "warmup_steps": 10, "total_steps": 103}


@pytest.fixture
def theirs(tmp_path):
    """Writes a file of MindFormers."""
    return writer(tmp_path)


def stable_rate(step: int, start: int, total: int, end: float) -> float:
    """MindFormers' ``WarmUpStableDecayLR.construct`` (2.1), with a warm-up of 10 steps to 1e-3."""
    if step < 10:
        return 1e-3 * step / 10
    return 1e-3 if step < start else 1e-3 - (1e-3 - end) * (step - start) / (total - start)


@pytest.mark.parametrize(
    ("keys", "start", "end"),
    [
        ({"decay_start_steps": 80}, 80, 1e-7),
        ({"decay_start_ratio": 0.77, "lr_end": 1e-5}, 79, 1e-5),
        ({"decay_start_ratio": 0.5, "decay_start_steps": 80}, 51, 1e-7),
    ],
)
def test_the_decay_begins_where_theirs_does(theirs, keys, start, end):
    schedule = load_config(theirs(LEGACY, {"lr_schedule": {**STABLE, **keys}})).lr_schedule
    rate = learning_rates(schedule, 103)
    assert [rate(step) for step in range(103)] == pytest.approx(
        [stable_rate(step, start, 103, end) for step in range(103)]
    )


def test_a_step_of_an_unknown_length_is_refused(theirs):
    with pytest.raises(UserError, match=r"write lr_schedule\.decay_start_ratio, or lr_schedule\.total_steps"):
        load_config(theirs(LEGACY, {"lr_schedule": {**STABLE, "total_steps": -1, "decay_start_steps": 80}}))
