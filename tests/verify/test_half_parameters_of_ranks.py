"""All ranks next to one device where parameters are in half precision: steps, a resume, and the types in their graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execute_clusters import HALF, OPTIMIZER, REAL, compiled_cluster, judged
from small_cluster import cluster_run

from mindllm.compiled.conformance import findings
from mindllm.compiled.execute.engine import LockstepEngine
from mindllm.verify.resume import resume_problems

CASES = ("half parameters", "half parameters of stages", "copied half parameters")
WEIGHT = "model.layers.1.feed_forward.w2.weight"


def dtypes(cluster, graphs):
    (finding,) = (one for one in findings(cluster.config, graphs) if one.what == "dtypes")
    return finding


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_device_does_and_go_on_from_a_checkpoint(name, graph_cache):
    cluster = compiled_cluster(f"{name} {REAL}", graph_cache)
    outcome = judged(cluster)
    assert outcome.ok, outcome.problems
    assert resume_problems(cluster.config, cluster.graphs, cluster.reference) == ()
    assert dtypes(cluster, cluster.graphs).holds, dtypes(cluster, cluster.graphs).problems
    kinds = {item.dtype for graph in cluster.graphs for key, item in graph.parameters.items() if key == WEIGHT}
    assert kinds == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "adam_m.", "accu_grads."])
def test_a_tensor_of_another_type_is_found(kind, graph_cache):
    name = "half parameters of stages" if kind == "accu_grads." else "half parameters"
    cluster = compiled_cluster(f"{name} {REAL}", graph_cache)
    graph = next(graph for graph in cluster.graphs if f"{kind}{WEIGHT}" in graph.parameters)
    held = graph.parameters[f"{kind}{WEIGHT}"]
    other = "bfloat16" if held.dtype == "float32" else "float32"
    parameters = {**graph.parameters, f"{kind}{WEIGHT}": replace(held, dtype=other)}
    (problem,) = dtypes(cluster, [replace(graph, parameters=parameters)]).problems
    assert f"{kind}{WEIGHT} is in {other}, not in {held.dtype}" in problem


@pytest.mark.slow
def test_ranks_on_a_cpu_hold_rounded_values_and_save_them_in_their_type(graph_cache):
    sections = {"context": {"device_target": "CPU", "enable_graph_kernel": False}, "parallel": OPTIMIZER}
    engine = LockstepEngine(cluster_run(dp=2, model=HALF, **sections), cache=graph_cache)
    tokens = np.random.default_rng(0).integers(0, 128, (4, 33)).astype(np.int32)
    columns = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones((4, 32), np.float32)}
    losses = [engine.step(columns, 1e-2, 1.0).loss for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    state = engine.local_state()
    held = {name: np.asarray(part.value) for rank in state.values() for name, part in rank.weights.items()}
    assert {array.dtype.name for name, array in held.items() if "norm" not in name} == {"bfloat16"}
    machine = engine._cluster.machines[0]
    stored = machine.parameters[WEIGHT].value
    assert stored.dtype == np.float32
    assert np.array_equal(stored, stored.astype(held[WEIGHT].dtype).astype(np.float32))
