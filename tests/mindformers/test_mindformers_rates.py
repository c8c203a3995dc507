"""Learning rates of MindFormers' YAMLs: the same rate at every step as its own classes compute."""

import pytest

from mindllm.config import load_config
from mindllm.config.reading.load import read_file
from mindllm.errors import UserError
from mindllm.mindformers.reader import convert
from mindllm.mindformers.reading import Outcome
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


GROUPS = {  # as in pretrain_telechat3_105b_a4b_4k.yaml of 2.1, with another schedule for the group
    "default": {"type": "ConstantWarmUpLR", "learning_rate": 2e-4, "warmup_steps": 20, "total_steps": 2400},
    "grouped": [
        {
            "type": "cosine",
            "params": ["embedding.*", "output_layer.weight"],
            "learning_rate": 1e-4,
            "warmup_steps": 10,
            "total_steps": 2400,
        }
    ],
}


def test_groups_have_their_rates_and_weights(theirs):
    config = load_config(theirs(LEGACY, {"grouped_lr_schedule": GROUPS}))
    assert (config.lr_schedule.learning_rate, config.lr_schedule.warmup_steps) == (2e-4, 20)
    (group,) = config.grouped_lr_schedule.grouped
    assert (group.type, group.learning_rate, group.warmup_steps) == ("CosineWithWarmUpLR", 1e-4, 10)
    numbers = {
        name: config.grouped_lr_schedule.group_of(name) for name in config.model.config.architecture.weight_shapes()
    }
    assert {name for name, number in numbers.items() if number} == {
        "model.tok_embeddings.embedding_weight",
        "lm_head.weight",
    }


def test_every_key_of_groups_has_an_outcome(theirs):
    conversion = convert(read_file(theirs(LEGACY, {"grouped_lr_schedule": GROUPS})))
    entries = {entry.key: entry.outcome for entry in conversion.entries}
    group = "grouped_lr_schedule.grouped.0"
    assert entries[f"{group}.params"] is entries[f"{group}.type"] is Outcome.TRANSLATED
    assert entries["grouped_lr_schedule.default.total_steps"] is Outcome.USED
    assert entries["lr_schedule.learning_rate"] is Outcome.WITHOUT_EFFECT


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("params", ["*linear_fc1*"], "weights of layers have other names here"),
        ("type", "MegatronLR", "this schedule is not here yet"),
        ("lr_scale", 2, "no key of lr_schedule"),
    ],
)
def test_what_a_group_cannot_have_is_refused(theirs, key, value, words):
    groups = {**GROUPS, "grouped": [{**GROUPS["grouped"][0], key: value}]}
    with pytest.raises(UserError, match=words):
        load_config(theirs(LEGACY, {"grouped_lr_schedule": groups}))
