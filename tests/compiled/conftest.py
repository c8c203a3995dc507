"""Compiles the ranks that the selected tests name, two at a time, each once, also for several workers of pytest together."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from simulations import Simulations
from small_cluster import cluster_run

from mindllm.compiled.graph import file as graph_file
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.rank.compile_rank import compile_rank

OPTIMIZER = {"enable_parallel_optimizer": True}
SHARED_BY_TWO = {"optimizer_weight_shard_size": 2, "parallel_optimizer_threshold": 0}
SEQUENCE = {"use_seq_parallel": True}
GEMMA3 = {
    **{"model_type": "gemma3_text", "hidden_act": "gelu_tanh", "tie_word_embeddings": True, "n_kv_heads": 1},
    **dict.fromkeys(("layernorm_zero_centered_gamma", "scale_embeddings", "sandwich_norm", "qk_layernorm"), True),
    **{"sliding_window": 16, "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0},
}
IN_A_V = {
    "model": {"num_layers": 4, "pp_interleave_num": 2},
    "parallel": {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}},
}
FEED_FORWARD = [r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"]

CASES = {
    "tp2": (0, {"tp": 2}),
    "tp2 sequence": (1, {"tp": 2, **SEQUENCE}),
    "tp2 sequence, rows in parts": (0, {"tp": 2, "model": {"fine_grain_interleave": 2}, **SEQUENCE}),
    "dp2": (1, {"dp": 2}),
    "dp2 slices": (0, {"dp": 2, "tp": 2, "parallel": {"full_batch": False}}),
    "dp2 accumulating": (0, {"dp": 2, "runner_config": {"gradient_accumulation_steps": 2}}),
    "dp2 accumulating, zero-centred norms": (
        0,
        {
            "dp": 2,
            "runner_config": {"gradient_accumulation_steps": 2},
            "model": GEMMA3,
            "parallel": OPTIMIZER,
        },
    ),
    "dp2 accumulating, optimizer": (
        0,
        {"dp": 2, "runner_config": {"gradient_accumulation_steps": 2}, "parallel": OPTIMIZER},
    ),
    "tied tp2": (0, {"tp": 2, "model": {"tie_word_embeddings": True, "loss_chunks": 2}, **SEQUENCE}),
    "dp2 optimizer level 3": (
        0,
        {"dp": 2, "parallel": OPTIMIZER, "recompute_config": {"parallel_optimizer_comm_recompute": True}},
    ),
    "dp4 shared optimizer state": (
        0,
        {"dp": 4, "parallel": {**OPTIMIZER, "parallel_optimizer_config": SHARED_BY_TWO}},
    ),
    "dp2 tp2, parts below the threshold": (
        0,
        {
            "dp": 2,
            "tp": 2,
            "parallel": {**OPTIMIZER, "parallel_optimizer_config": {"parallel_optimizer_threshold": 8}},
            **SEQUENCE,
        },
    ),  # weights of 8192 bytes, of which each tensor-parallel rank has 4096
    "dp2 tp2": (3, {"dp": 2, "tp": 2, "parallel": OPTIMIZER, **SEQUENCE}),
    "experts": (
        0,
        {
            "dp": 2,
            "expert_parallel": 2,
            "model": {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2, "capacity_factor": 1.0},
        },
    ),
    "split vocabulary": (0, {"dp": 2, "tp": 2, "vocab_emb_dp": False, **SEQUENCE}),
    "composed": (
        0,
        {
            "dp": 2,
            "tp": 2,
            "context": {"device_target": "CPU"},
            "model": {"qkv_has_bias": True, "attn_proj_has_bias": True},
            **SEQUENCE,
        },
    ),
    "full": (0, {"tp": 2, "recompute_config": {"recompute": [1]}, **SEQUENCE}),
    "full without communication": (
        0,
        {"tp": 2, "recompute_config": {"recompute": [1], "mp_comm_recompute": False}, **SEQUENCE},
    ),
    "full without silu": (
        0,
        {"tp": 2, "recompute_config": {"recompute": True, "select_recompute_exclude": FEED_FORWARD}},
    ),
    "select": (0, {"tp": 2, "recompute_config": {"select_recompute": [1]}, **SEQUENCE}),
    "comm": (
        0,
        {
            "tp": 2,
            "recompute_config": {"select_recompute": {r".*\.norm": [1]}, "select_comm_recompute": [1]},
            **SEQUENCE,
        },
    ),
    "kept slices": (0, {"tp": 2, "recompute_config": {"recompute": True, "recompute_slice_activation": True}}),
    "pp2 first": (0, {"pp": 2, "micro": 4}),
    "pp2 last": (1, {"pp": 2, "micro": 4}),
    "interleaved first": (
        0,
        {
            "pp": 2,
            "micro": 4,
            "model": {"num_layers": 4, "pp_interleave_num": 2},
            "parallel": {"pipeline_config": {"pipeline_interleave": True}},
        },
    ),
    "v first": (0, {"pp": 2, "micro": 5, **IN_A_V}),
    "v last": (1, {"pp": 2, "micro": 5, **IN_A_V}),
    "tied first": (0, {"pp": 2, "micro": 2, "model": {"tie_word_embeddings": True}}),
    "tied last": (1, {"pp": 2, "micro": 2, "model": {"tie_word_embeddings": True}}),
    "tied between": (1, {"pp": 4, "micro": 4, "model": {"tie_word_embeddings": True, "num_layers": 4}}),
    "all": (6, {"dp": 2, "tp": 2, "pp": 2, "micro": 2, "parallel": OPTIMIZER, **SEQUENCE}),
    "interleaved all": (
        5,  # the second device of stage 1
        {
            "dp": 2,
            "tp": 2,
            "pp": 2,
            "micro": 4,
            "model": {"num_layers": 6, "pp_interleave_num": 2, "offset": [[1, 0], [0, 1]]},
            "parallel": {**OPTIMIZER, "pipeline_config": {"pipeline_interleave": True}},
            "recompute_config": {
                "recompute": [[1, 0], [0, 1]],
                "select_recompute": True,
                "select_comm_recompute": True,
            },
            **SEQUENCE,
        },
    ),
    "cp2 balanced halves": (1, {"context_parallel": 2, "context_parallel_balanced": True}),
    "one device": (0, {"use_parallel": False, "recompute_config": {"recompute": [1]}}),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "compiles(*names): the ranks of CASES that a test looks at")
    config.addinivalue_line("markers", "simulates(*names): the ranks of simulations.CASES that a test looks at")


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Returns the graph of a case by name."""
    marks = (mark for item in request.session.items for mark in item.iter_markers("compiles"))
    names = dict.fromkeys(name for mark in marks for name in mark.args)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with ThreadPoolExecutor(max_workers=2) as pool:
            futures = {name: pool.submit(_compile, *CASES[name]) for name in names}
            graphs: Callable[[str], CompiledGraph] = lambda name: futures[name].result()  # noqa: E731
            yield graphs
    else:
        shared = tmp_path_factory.getbasetemp().parent / "graphs"
        shared.mkdir(exist_ok=True)
        yield functools.cache(lambda name: _compile_once(shared, name))


def _compile_once(shared: Path, name: str) -> CompiledGraph:
    """Compiles a case unless another worker has; two of them rarely want the same one at the same time."""
    kept = shared / f"{name}.graph"
    if not kept.exists():
        graph_file.save(_compile(*CASES[name]), kept)
    return graph_file.load(kept)


def _compile(rank: int, run: dict) -> CompiledGraph:
    return compile_rank(cluster_run(**run), rank)


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest):
    """Returns the simulation of a case by name."""
    marks = (mark for item in request.session.items for mark in item.iter_markers("simulates"))
    simulations = Simulations(list(dict.fromkeys(name for mark in marks for name in mark.args)))
    yield simulations
    simulations.pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def compiled_with_text(tmp_path_factory):
    """A rank, and the text of the same graph as MindSpore writes it."""
    directory = tmp_path_factory.mktemp("text")
    run = {**CASES["all"][1], "context": {"save_graphs": 1, "save_graphs_path": str(directory)}}
    graph = _compile(CASES["all"][0], run)
    return graph, next(directory.glob("rank_6/*_validate_*.ir")).read_text(encoding="utf-8")
