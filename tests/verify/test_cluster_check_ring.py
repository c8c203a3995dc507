"""Two devices that pass keys and values on: healthy they pass, and mistakes in what goes round are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execute_clusters import Compiled, compiled_cluster, judged, tampered

from mindllm.compiled.conformance import findings
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, IN_LENGTHS
from mindllm.compiled.graph.operators import BACKWARD, FORWARD, RECOMPUTED, Operators
from mindllm.compiled.inspect.comm import CONTEXT, exchanges


@pytest.fixture(scope="module")
def ring(graph_cache) -> Compiled:
    return compiled_cluster("ring", graph_cache)


def test_every_layer_passes_keys_and_values_on(ring):
    outcome = judged(ring)
    assert outcome.ok, outcome.problems
    found = {finding.what: finding for finding in findings(ring.config, ring.graphs)}
    assert all(finding.holds for finding in found.values())
    assert found["sequences"].asked == found["sequences"].found == "keys and values passed on over 2 ranks"


def test_keys_of_the_forward_pass_are_not_kept(ring):
    """They come round again: for each layer once, once when it is computed again, and backward once, their gradients twice."""
    for graph in ring.graphs:
        known = Operators(graph)
        phases = [known.phase(node) for node in known.nodes if node.op == IN_LENGTHS]
        layers = ring.config.model.config.num_layers
        assert [phases.count(phase) for phase in (FORWARD, RECOMPUTED, BACKWARD)] == [layers, layers, 3 * layers]


def test_the_backward_pass_reads_what_is_computed_again(ring):
    for graph in ring.graphs:
        known = Operators(graph)
        gradients = [node for node in known.nodes if node.op == "FlashAttentionScoreGrad"]
        read = {
            known.phase(known.named[name])
            for node in gradients
            for name in (*node.inputs[:4], *node.inputs[8:12])
            if name in known.named
        }
        assert gradients
        assert read <= {RECOMPUTED, BACKWARD}


def test_all_ranks_exchange_in_the_same_order(ring):
    """Or devices would wait for each other: ranks have the same operators, and what they see is a number."""
    orders = [[(node.op, node.scope) for node in graph.nodes() if node.op in COLLECTIVES] for graph in ring.graphs]
    assert orders[0] == orders[1]
    places = [
        [value.initial for name, value in graph.parameters.items() if name.endswith("attention.place")]
        for graph in ring.graphs
    ]
    assert [np.unique(of_rank).tolist() for of_rank in places] == [[0], [1]]


@pytest.mark.slow
def test_a_rank_that_takes_itself_for_another(ring):
    """Its late queries see the late keys of a later rank, and not the early ones of an earlier."""
    first, second = ring.graphs
    known = {
        name: replace(parameter, initial=np.zeros_like(parameter.initial)) if name.endswith(".place") else parameter
        for name, parameter in second.parameters.items()
    }
    outcome = judged(ring, [first, replace(second, parameters=known)])
    assert any(problem.startswith("step 1: loss: ") for problem in outcome.problems)


@pytest.mark.slow
def test_statistics_that_are_not_merged(ring):
    """Every block is weighed as if it were all that a query sees."""

    def merges(node):
        return node.op == "Exp" and "RingAttention" in node.scope

    graphs = [tampered(graph, merges, lambda node: [replace(node, op="TensorMove")]) for graph in ring.graphs]
    assert any(problem.startswith("step 1: loss: ") for problem in judged(ring, graphs).problems)


@pytest.mark.slow
def test_gradients_of_keys_that_do_not_return(ring):
    """The last exchange of gradients is left out on all ranks: each keeps those of another's keys."""

    def returns(node):
        return node.op == IN_LENGTHS and "pass_gradients" in node.scope and node.scope.endswith("-op1")

    graphs = [
        tampered(graph, returns, lambda node: [replace(node, op="TensorMove", inputs=node.inputs[:1])])
        for graph in ring.graphs
    ]
    assert judged(ring, graphs).problems


def test_what_is_gathered_instead_is_told(ring):
    sizes = ring.config.parallel_config.model_copy(update={"context_parallel_algo": "colossalai_cp"})
    other = ring.config.model_copy(update={"parallel_config": sizes})
    found = {finding.what: finding for finding in findings(other, ring.graphs)}
    assert not found["sequences"].holds


def test_what_goes_round_is_told_as_that(ring):
    found = [one for one in exchanges(ring.graphs[0]) if one.operator == IN_LENGTHS]
    assert {(one.cause, one.bytes, one.sent) for one in found} == {(CONTEXT, found[0].bytes, found[0].bytes)}
