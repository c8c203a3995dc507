"""Clusters that the tests of execution share: compiled once, and a single device that trained on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from small_cluster import cluster_run

from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.compiled.rank.compile_ranks import compile_ranks
from mindllm.config import RunConfig, render_config
from mindllm.reduced_runs.model import reduce_model, single_device
from mindllm.verify.locate import judge
from mindllm.verify.outcome import Outcome
from mindllm.verify.side import Reference, train_cluster, train_single

OPTIMIZER = {"enable_parallel_optimizer": True}
BIASED = {"qkv_has_bias": True, "attn_proj_has_bias": True}
ALLOCATED = {
    "pet_config": {
        **{"pet_type": "adalora", "adalora_init_r": 4, "adalora_target_r": 2, "target_modules": ["wq", "wo", "w2"]},
        **{"adalora_tfinal": 7, "adalora_orth_reg_weight": 2.0, "modules_to_save": ["norm_out", "lm_head"]},
    }
}
TWO_PARTS = {"gradient_accumulation_steps": 2}
PROJECTED = {"pet_config": {"pet_type": "galore", "galore_rank": 4, "galore_update_proj_gap": 2}}
HALF = {"compute_dtype": "bfloat16", "param_init_type": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "biased": {
        "dp": 2,
        "tp": 2,
        "use_seq_parallel": True,
        "model": BIASED,
    },
    "stages": {"pp": 2, "micro": 2, "model": BIASED},
    "slices": {"dp": 2, "parallel": OPTIMIZER, "model": BIASED},
    "experts": {
        "dp": 4,
        "expert_parallel": 2,
        "model": {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2},
    },
    "experts of global batches": {
        "dp": 2,
        "expert_parallel": 2,
        "model": {
            **{"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2},
            **{"aux_loss_types": ["global"], "aux_loss_factors": [0.5]},
        },
    },
    "experts of four groups": {
        "dp": 4,
        "expert_parallel": 4,
        "model": {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2},
    },
    "sorted experts": {
        "dp": 4,
        "expert_parallel": 2,
        "model": {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2, "moe_grouped_gemm": True},
    },
    "sent experts": {
        "dp": 2,
        "expert_parallel": 2,
        "model": {
            **{"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2, "moe_grouped_gemm": True},
            **{"moe_token_dispatcher_type": "alltoall"},
        },
    },
    "prediction": {
        "pp": 2,
        "micro": 2,
        "model": {
            **{
                "model_type": "deepseek_v3",
                "n_kv_heads": 4,
                "rms_norm_eps": 1e-6,
                "kv_lora_rank": 16,
                "q_lora_rank": 24,
            },
            **{
                "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 8,
                "v_head_dim": 10,
                "expert_num": 4,
                "num_experts_chosen": 2,
            },
            **{"moe_shared_expert_intermediate_size": 32, "moe_intermediate_size": 32, "use_gating_sigmoid": True},
            **{
                "balance_via_topk_bias": True,
                "first_k_dense_replace": 1,
                "num_nextn_predict_layers": 1,
                "offset": [0, 1],
            },
        },
    },
    "sequences": {"context_parallel": 2, "runner_config": {"batch_size": 1}},
    "ring": {
        "context_parallel": 2,
        "context_parallel_algo": "ring_cp",
        "context_parallel_balanced": True,
        "recompute_config": {"recompute": True},
        "runner_config": {"batch_size": 1},
    },
    "tied": {"pp": 2, "micro": 2, "model": {"tie_word_embeddings": True}},
    "half parameters": {"dp": 2, "parallel": OPTIMIZER, "model": HALF},
    "half parameters of stages": {"pp": 2, "micro": 2, "model": {**HALF, "tie_word_embeddings": True}},
    "copied half parameters": {
        "dp": 2,
        "runner_config": TWO_PARTS,
        "optimizer": {"master_weights": True, "accumulate_in_float32": True},
        "model": HALF,
    },
    "ranks of neighbours": {"tp": 2, "runner_config": TWO_PARTS, "model": ALLOCATED},
    "ranks of stages": {"pp": 2, "micro": 2, "model": ALLOCATED},
    "ranks of slices": {"dp": 2, "parallel": OPTIMIZER, "model": ALLOCATED},
    "projections of neighbours": {"tp": 2, "runner_config": TWO_PARTS, "model": PROJECTED},
    "projections of stages": {"pp": 2, "micro": 2, "model": PROJECTED},
    "projections of slices": {"dp": 2, "parallel": OPTIMIZER, "model": PROJECTED},
}
REAL = "in its own dtype"
"""A cluster computes in fp32, or, with this behind the name of its case, in the fp16 of its YAML."""
Change = Callable[[Node], Sequence[Node]]


@dataclass(frozen=True)
class Compiled:
    """A small configuration, the graphs of its ranks, and what a single device computes."""

    config: RunConfig
    graphs: list[CompiledGraph]
    reference: Reference
    cache: Path


_references: dict[str, Reference] = {}
"""By the configuration of the single device: several layouts have the same."""


@cache
def compiled_cluster(name: str, directory: Path, steps: int = 2) -> Compiled:
    """The cluster of a case; compiled graphs are kept in ``directory``."""
    case = name.removesuffix(REAL).strip()
    config = reduce_model(cluster_run(**CASES[case]), real_dtype=name.endswith(REAL))
    graphs = compile_ranks(config, directory)
    alone = render_config(single_device(config))
    if alone not in _references:
        _references[alone] = train_single(config, steps)
    return Compiled(config, graphs, _references[alone], directory)


def judged(cluster: Compiled, graphs: list[CompiledGraph] | None = None) -> Outcome:
    """The answer for a cluster, or for one whose graphs were tampered with."""
    graphs = graphs or cluster.graphs
    comparisons = train_cluster(cluster.config, graphs, cluster.reference)
    return judge(cluster.config, graphs, cluster.reference, comparisons, cluster.cache)


def tampered(graph: CompiledGraph, where: Callable[[Node], bool], change: Change) -> CompiledGraph:
    """A copy of a graph in which ``change`` says what stands in place of the nodes it is asked about; there must be one."""
    assert any(where(node) for node in graph.nodes())
    functions = tuple(
        replace(
            function,
            nodes=tuple(new for node in function.nodes for new in (change(node) if where(node) else [node])),
        )
        for function in graph.functions
    )
    return replace(graph, functions=functions)
