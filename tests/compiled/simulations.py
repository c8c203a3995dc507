"""Ranks that tests simulate, each once for a whole session."""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from small_cluster import cluster_run

from mindllm.compiled.device.stand_in import COMPILERS, installed_software
from mindllm.compiled.simulation.simulate_rank import simulate_rank
from mindllm.compiled.simulation.simulation import Simulation

EVERYTHING = {
    "dp": 2,
    "tp": 2,
    "pp": 2,
    "micro": 4,
    "use_seq_parallel": True,
    "parallel": {"enable_parallel_optimizer": True},
    "model": {"num_layers": 6},
    "recompute_config": {"select_recompute": [1, 2], "select_comm_recompute": [2, 1]},
}
# Long rows, so that activations outweigh the mask.
LONG = {"seq_length": 2048, "vocab_size": 512}
MANY_LOGITS = {"seq_length": 1024, "vocab_size": 8192}
INTERLEAVED = {
    "pp": 2,
    "micro": 4,
    "model": {"num_layers": 4, "pp_interleave_num": 2},
    "parallel": {"pipeline_config": {"pipeline_interleave": True}},
}
EXPERTS = {
    "pp": 2,
    "micro": 2,
    "model": {
        "model_type": "mixtral",
        "num_layers": 4,
        "expert_num": 4,
        "num_experts_chosen": 2,
        "aux_loss_types": ["expert"],
        "aux_loss_factors": [0.01],
    },
}
CASES = {
    "all first": (0, EVERYTHING, False),
    "all last": (7, EVERYTHING, False),
    "all last, whole": (7, EVERYTHING, True),
    "experts first": (0, EXPERTS, False),
    "experts first, whole": (0, EXPERTS, True),
    "tp2": (1, {"tp": 2, "model": LONG}, False),
    "tp2 full": (1, {"tp": 2, "model": LONG, "recompute_config": {"recompute": True}}, False),
    "interleaved": (0, INTERLEAVED, False),
    "galore": (
        0,
        {"dp": 2, "model": {"hidden_size": 256, "pet_config": {"pet_type": "galore", "galore_rank": 4}}},
        False,
    ),
    "dropout": (
        0,
        {
            "dp": 2,
            "model": {"num_layers": 4, "attention_dropout": 0.1, "hidden_dropout": 0.1},
            "recompute_config": {"recompute": True},
        },
        False,
    ),
    "logits": (0, {"dp": 2, "model": MANY_LOGITS}, False),
    "logits in slices": (0, {"dp": 2, "model": {**MANY_LOGITS, "loss_chunks": 4}}, False),
}
can_simulate = installed_software() is not None or any(map(shutil.which, COMPILERS))
needs_compiler = pytest.mark.skipif(not can_simulate, reason="simulating a device needs a C compiler")


class Simulations:
    """Simulates the named cases two at a time; calling it with a name waits for that one."""

    def __init__(self, names: list[str]) -> None:
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.futures: dict[str, Future[Simulation]] = {
            name: self.pool.submit(_simulate, *CASES[name]) for name in names
        }

    def __call__(self, name: str) -> Simulation:
        return self.futures[name].result()


def _simulate(rank: int, run: dict, whole: bool) -> Simulation:
    return simulate_rank(cluster_run(**run), rank, whole=whole)
