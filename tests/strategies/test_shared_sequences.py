"""Forms in which a search lets ranks share sequences."""

import pytest
from small_cluster import cluster_run

from mindllm.config import override_config
from mindllm.strategies.candidates import Candidate, sharings
from mindllm.strategies.search import evaluate_current
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.step import step_time

LONG = {
    "num_layers": 2,
    "hidden_size": 512,
    "num_heads": 4,
    "n_kv_heads": 4,
    "intermediate_size": 1408,
    "seq_length": 8192,
}
DEVICE = read_device(DEFAULT)


def run(**model):
    return cluster_run(dp=4, model={**LONG, **model}, runner_config={"batch_size": 1})


def shared(sharing):
    """The run on four devices whose ranks share sequences so."""
    one = Candidate(4 // sharing.ranks, 1, 1, 1, 1, sharing.ranks, False, True, 1, None, sharing)
    return override_config(run(), one.overrides())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, ["", " cp2 in halves", " cp2 of heads", " cp2 in a ring in halves"]),
        ({"sliding_window": 1024, "model_type": "mistral"}, ["", " cp2", " cp2 of heads"]),
        ({"n_kv_heads": 1}, ["", " cp2 in halves", " cp2 in a ring in halves"]),
    ],
    ids=["causal", "windows", "one key head"],
)
def test_keys_go_round_wherever_a_run_may_have_it(model, expected):
    found = [sharing.name for sharing in sharings(run(**model), 2, 1, 1)]
    assert found == expected


def test_over_stages_keys_go_round_in_order():
    assert [sharing.name for sharing in sharings(run(), 2, 1, 2)] == ["", " cp2 in a ring"]


def test_every_form_is_the_run_that_the_search_judges():
    for sharing in sharings(run(), 4, 1, 1):
        made = shared(sharing)
        judged = evaluate_current(made, DEVICE)
        assert judged.candidate.sharing == sharing
        assert judged.step.seconds == pytest.approx(step_time(workload_of(made), DEVICE).seconds)


def test_a_ring_keeps_less_than_gathered_keys():
    """Keys and values of the rank's own tokens, not of the whole sequence, for each layer."""
    forms = {sharing.name: shared(sharing) for sharing in sharings(run(), 4, 1, 1)}
    sizes = {name: stage_bytes(workload_of(config))[0] for name, config in forms.items()}
    assert sizes[" cp4 in a ring in halves"] < sizes[" cp4 in halves"]
