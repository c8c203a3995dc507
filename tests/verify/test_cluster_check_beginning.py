"""Weights that a rank would begin a run with, which are not those of the steps that are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from execute_clusters import Compiled, compiled_cluster

from mindllm.architecture.optimizer_state import updated_weights
from mindllm.verify.initial import weight_problems

BIAS, NORM, MATRIX = (
    f"model.layers.1.{name}" for name in ("attention.wq.bias", "ffn_norm.weight", "attention.wo.weight")
)


@pytest.fixture(scope="module")
def biased(graph_cache) -> Compiled:
    return compiled_cluster("biased", graph_cache)


def problems(cluster: Compiled, rank: int | None = None, name: str = "", **changes):
    """What is found where one weight of one rank begins otherwise."""
    graphs = [
        replace(graph, parameters={**graph.parameters, name: replace(graph.parameters[name], **changes)})
        if graph.rank == rank
        else graph
        for graph in cluster.graphs
    ]
    return list(weight_problems(graphs, cluster.config.seed, cluster.reference.begins))


def test_ranks_begin_as_a_single_device(biased):
    assert problems(biased) == []
    kinds = {name: parameter.begins for name, parameter in biased.graphs[1].parameters.items() if parameter.begins}
    assert kinds.keys() == set(updated_weights(biased.graphs[1].parameters))
    assert (kinds[BIAS], kinds[NORM], kinds[MATRIX][0]) == (("constant", 0.0), ("constant", 1.0), "initial_std")


@pytest.mark.parametrize(
    ("name", "begins", "text"),
    [
        (NORM, ("constant", 0.0), "off by 1.00e+00"),
        (BIAS, ("initial_std", 0.02), "off by "),
        (MATRIX, ("initial_std", 0.02), "off by "),  # ends a residual branch: smaller, by the number of layers
        (MATRIX, None, "its initial value is unknown"),
    ],
)
def test_a_weight_that_begins_otherwise_on_one_rank(biased, name, begins, text):
    (found,) = problems(biased, 2, name, begins=begins)
    assert found.startswith(f"{name} on rank 2, before the first step: {text}")
