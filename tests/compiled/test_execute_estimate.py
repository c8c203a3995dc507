"""What executing all ranks takes is told before anything is compiled."""

import pytest
from small_cluster import cluster_run

from mindllm.compiled.execute import estimate as module
from mindllm.compiled.execute.estimate import estimate, refuse_too_large
from mindllm.config import override_config
from mindllm.errors import UserError
from mindllm.jobs import memory as host_memory

RUN = cluster_run(dp=2, tp=2, pp=2, micro=2, context={"device_target": "CPU"})
LARGE = override_config(RUN, {"model.model_config.hidden_size": 4096, "model.model_config.num_layers": 64})


def test_more_layers_take_more_of_both():
    deeper = override_config(RUN, {"model.model_config.num_layers": 8})
    small, large = estimate(RUN, 1e9), estimate(deeper, 1e9)
    assert small.memory < large.memory
    assert small.step_seconds < large.step_seconds


def test_recomputation_keeps_less():
    again = override_config(RUN, {"recompute_config.recompute": True})
    assert estimate(again, 1e9).memory < estimate(RUN, 1e9).memory


@pytest.fixture
def no_claims(monkeypatch):
    """A process that has claimed nothing yet."""
    monkeypatch.setattr(host_memory, "_claims", [])


def test_a_small_run_is_let_through_and_claims_its_memory(no_claims):
    refuse_too_large(RUN)
    (claim,) = host_memory._claims
    assert claim.budget is not None
    claim.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("free", "rate", "wanted"),
    [
        (
            1 << 30,
            1e15,
            ["describes 8 devices", "GB of memory, and there are 0.6 GB, 60% of the 1.0 GB", "mindllm check"],
        ),
        (1 << 60, 1e6, ["context.lockstep_step_seconds", "s per step", "value 300", "allow more"]),
    ],
)
def test_a_large_one_is_refused_with_the_estimate(monkeypatch, no_claims, free, rate, wanted):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free)
    monkeypatch.setattr(host_memory, "claimed_by_others", lambda directory: 0)
    monkeypatch.setattr(module, "matmul_rate", lambda: rate)
    with pytest.raises(UserError) as caught:
        refuse_too_large(LARGE)
    for words in wanted:
        assert words in str(caught.value)
