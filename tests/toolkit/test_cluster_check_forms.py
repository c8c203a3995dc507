"""Every form of recomputation, sharding and scheduling the YAML can ask for, executed and held against a single device."""

from __future__ import annotations

from typing import Any

import pytest
from small_cluster import cluster_run

from toolkit.cluster_check.check import Options, check

OPTIMIZER = {"enable_parallel_optimizer": True}
INTERLEAVED = {"pipeline_config": {"pipeline_interleave": True}}
SEQUENCE = {"use_seq_parallel": True}
FEED_FORWARD = [r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"]
FORMS: dict[str, dict[str, Any]] = {
    "split vocabulary, communication kept": {
        "tp": 2,
        "vocab_emb_dp": False,
        "recompute_config": {"recompute": True, "mp_comm_recompute": False},
        **SEQUENCE,
    },
    "slices of activations, an excluded operator": {
        "tp": 2,
        "recompute_config": {
            "recompute": True,
            "recompute_slice_activation": True,
            "select_recompute_exclude": FEED_FORWARD,
        },
    },
    "selected operators and communication": {
        "tp": 2,
        "recompute_config": {"select_recompute": True, "select_comm_recompute": True},
        **SEQUENCE,
    },
    "tied, loss in chunks": {"tp": 2, "model": {"tie_word_embeddings": True, "loss_chunks": 2}, **SEQUENCE},
    "sliced inputs": {"dp": 2, "parallel": {"full_batch": False}},
    "weights gathered again, accumulation": {
        "dp": 2,
        "parallel": OPTIMIZER,
        "runner_config": {"gradient_accumulation_steps": 2},
        "recompute_config": {"parallel_optimizer_comm_recompute": True},
    },
    "accumulation, parallel optimizer": {
        "dp": 2,
        "parallel": OPTIMIZER,
        "runner_config": {"gradient_accumulation_steps": 2},
    },
    "sharded accumulators in a pipeline": {
        "dp": 2,
        "pp": 2,
        "micro": 2,
        "parallel": {**OPTIMIZER, "parallel_optimizer_config": {"gradient_accumulation_shard": True}},
    },
    "interleaved and uneven": {
        "pp": 2,
        "micro": 4,
        "model": {"num_layers": 5, "pp_interleave_num": 2, "offset": [[1, 0], [0, 0]]},
        "parallel": INTERLEAVED,
    },
    "all at once": {
        "dp": 2,
        "tp": 2,
        "pp": 2,
        "micro": 2,
        "parallel": OPTIMIZER,
        "recompute_config": {"recompute": True},
        **SEQUENCE,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_form_computes_what_one_device_does(name, graph_cache):
    outcome = check(cluster_run(**FORMS[name]), Options(cache=graph_cache))
    assert outcome.ok, (outcome.problems[:3], outcome.first_difference)
