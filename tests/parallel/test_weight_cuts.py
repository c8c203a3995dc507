"""How weights are cut: arithmetic of the cut, and the sharding table's beside the layouts of compiled graphs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from small_cluster import cluster_run

from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.finetune.transform import tune
from mindllm.models import CausalLM
from mindllm.parallel.build import kernels_of
from mindllm.parallel.layout import mesh_of
from mindllm.parallel.sharding.weights import weight_cuts
from mindllm.parallel.weight_cut import WeightCut

SHARED = {"enable_parallel_optimizer": True}
PAIRS = {**SHARED, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0, "optimizer_weight_shard_size": 2}}
EXPERTS = {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2}
SAVED = {"modules_to_save": ["tok_embeddings", "norm_out", "lm_head"]}
RUNS = {
    "replicas": (3, {"dp": 4, "parallel": PAIRS}),
    "neighbours": (2, {"dp": 2, "tp": 2, "use_seq_parallel": True, "model": {"qkv_has_bias": True}}),
    "pairs of neighbours": (5, {"dp": 4, "tp": 2, "parallel": PAIRS}),
    "stages": (6, {"dp": 2, "tp": 2, "pp": 2, "micro": 2, "parallel": SHARED, "model": {"tie_word_embeddings": True}}),
    "sequences": (3, {"context_parallel": 2, "tp": 2, "parallel": SHARED, "runner_config": {"batch_size": 1}}),
    "rows of unit length": (
        1,
        {"dp": 2, "tp": 2, "parallel": SHARED, "model": {"model_type": "baichuan", "norm_head": True, "n_kv_heads": 4}},
    ),
    "experts": (3, {"dp": 4, "tp": 2, "expert_parallel": 2, "parallel": SHARED, "model": EXPERTS}),
    "experts that replicas do not divide": (
        6,
        {"dp": 4, "tp": 2, "expert_parallel": 4, "expert_model_parallel": 1, "parallel": SHARED, "model": EXPERTS},
    ),
    "experts of sorted tokens": (
        5,
        {
            "dp": 4,
            "tp": 2,
            "expert_parallel": 2,
            "expert_model_parallel": 1,
            "use_seq_parallel": True,
            "parallel": PAIRS,
            "model": {**EXPERTS, "moe_grouped_gemm": True},
        },
    ),
    "whole vocabulary": (1, {"dp": 2, "tp": 2, "parallel": SHARED, "vocab_emb_dp": True}),
    "adapters with lengths": (
        3,
        {"dp": 2, "tp": 2, "parallel": SHARED, "model": {"pet_config": {"use_dora": True, **SAVED}}},
    ),
    "adapters with values": (
        3,
        {
            "dp": 2,
            "tp": 2,
            "parallel": SHARED,
            "model": {"pet_config": {"pet_type": "adalora", "adalora_init_r": 8, **SAVED}},
        },
    ),
}


def cuts_of(config):
    lm = CausalLM(config.model.config, kernels_of(config))
    tune(lm, config.model.config, kernels_of(config))
    return weight_cuts(lm, config)


@pytest.mark.parametrize(
    "cut",
    [
        WeightCut((8, 12)),
        WeightCut((8, 12), None, 1, 4, 8),
        WeightCut((8, 12), 0, 2, 2, 8),
        WeightCut((8, 12), 1, 4, 2, 8),
        WeightCut((8, 12), None, 4, 2, 16),
        WeightCut((8, 12), 1, 2, 1, 4),
        WeightCut((8, 6, 4), None, 1, 2, 8, 4),
        WeightCut((8, 6, 4), 1, 2, 2, 16, 2),
        WeightCut((4, 6, 8), 2, 2, 1, 8, 2),
    ],
    ids=str,
)
def test_the_parts_of_a_weight_are_all_of_it(cut):
    for stage in range(2):
        ranks = range(stage * cut.devices, (stage + 1) * cut.devices)
        counts = np.zeros(cut.shape, int)
        for rank in ranks:
            where = cut.layout(rank).slices(rank)
            own = tuple(
                slice(first := cut.first(side, rank), first + cut.part_shape[side]) for side in range(len(cut.shape))
            )
            assert where == own
            counts[own] += 1
            for side, size in enumerate(cut.shape):
                along = cut.ranks_along(side, rank)
                assert rank in along
                assert [cut.first(side, other) for other in along] == [*range(0, size, size // len(along))]
                beside = [place for place in range(len(cut.shape)) if place != side]
                where = [[cut.layout(other).slices(other)[place] for place in beside] for other in along]
                assert all(one == where[0] for one in where)
                assert all(cut.ranks_along(side, other) == along for other in along)
        assert (counts == cut.copies).all()
        first = [rank for rank in ranks if cut.layout(rank).copies_before(rank) == 0]
        assert len(first) == math.prod(cut.parts(side) for side in range(len(cut.shape)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "stages" else ()) for name in RUNS]
)
def test_weights_are_cut_as_the_compiler_cuts_them(name):
    rank, run = RUNS[name]
    config = cluster_run(**run)
    found, graph = cuts_of(config), compile_rank(config, rank)
    devices = mesh_of(config).stage_device_num
    seen = 0
    for weight, cut in found.items():
        if f"adam_m.{weight}" not in graph.parameters:
            continue
        parameter = graph.parameters[weight]
        seen += 1
        assert parameter.layout.slices(rank) == cut.layout(rank).slices(rank), weight
        assert parameter.shape == cut.part_shape, weight
        assert cut.devices == devices
        sharing = parameter.layout.optimizer_ranks
        assert cut.shards == max(len(sharing), 1), weight
        if sharing:
            assert cut.layout(rank).optimizer_ranks == sharing, weight
    assert seen >= 10
