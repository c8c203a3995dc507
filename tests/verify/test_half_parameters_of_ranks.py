"""All ranks next to one device where parameters are in half precision: steps, a resume, and the types in their graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from execute_clusters import REAL, compiled_cluster, judged

from mindllm.compiled.conformance import findings
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
