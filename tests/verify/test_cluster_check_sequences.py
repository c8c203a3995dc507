"""Two devices that share each sequence: healthy they pass, and mistakes in what follows the split are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from execute_clusters import Compiled, compiled_cluster, judged, tampered

from mindllm.compiled.conformance import findings
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node, OtherType
from mindllm.verify.locate import NOT_IN_OPERATORS, locate

WEIGHT = "model.layers.1.feed_forward.w2.weight"
ATTENTION = ("FlashAttentionScore", "FlashAttentionScoreGrad")
BOUNDS = slice(-5, -3)  # of a band, among the inputs of both


@pytest.fixture(scope="module")
def shared(graph_cache) -> Compiled:
    return compiled_cluster("sequences", graph_cache)


def scalars(graph: CompiledGraph, node: Node) -> list:
    """Values of the constants an operator reads; None for its tensors."""
    constants = {node.name: node.value for node in graph.nodes() if node.op == "Constant"}
    return [constants.get(name) for name in node.inputs]


def test_every_layer_gathers_keys_and_values_and_attends_from_its_part(shared):
    outcome = judged(shared)
    assert outcome.ok, outcome.problems
    assert locate(shared.config, shared.graphs, shared.reference, 0, shared.cache) == NOT_IN_OPERATORS
    found = {finding.what: finding for finding in findings(shared.config, shared.graphs)}
    assert all(finding.holds for finding in found.values())
    assert found["sequences"].asked == found["sequences"].found == "keys and values gathered over 2 ranks"
    assert found["shardings"].asked == "cp2"


def test_positions_that_are_not_shifted(shared):
    """The second rank turns its queries and keys as the first one does."""
    first, second = shared.graphs
    tables = {
        name: replace(parameter, initial=first.parameters[name].initial) if "rotary" in name else parameter
        for name, parameter in second.parameters.items()
    }
    assert not (tables["model.tables.0.contexts.0.rotary_cos"].initial == 1).all()
    outcome = judged(shared, [first, replace(second, parameters=tables)])
    assert outcome.problems[0].startswith("model.tables.0.contexts.0.rotary_cos on rank 1: off by ")
    assert any(problem.startswith("step 1: loss: ") for problem in outcome.problems)


@pytest.mark.slow
def test_a_causal_mask_that_is_not_shifted(shared):
    """The second rank's queries see what those of the first one may see."""
    first, second = shared.graphs
    bounds = [
        scalars(graph, next(node for node in graph.nodes() if node.op == ATTENTION[0]))[BOUNDS]
        for graph in (first, second)
    ]
    assert bounds[0] != bounds[1], "masks of ranks are told by number"

    def as_the_first(node: Node) -> list[Node]:
        names = [f"{node.name}_{place}" for place in range(len(bounds[0]))]
        constants = [
            Node("Constant", name, (), OtherType("INT64"), "", {}, value=value)
            for name, value in zip(names, bounds[0], strict=True)
        ]
        inputs = list(node.inputs)
        inputs[BOUNDS] = names
        return [*constants, replace(node, inputs=tuple(inputs))]

    outcome = judged(shared, [first, tampered(second, lambda node: node.op in ATTENTION, as_the_first)])
    assert any(problem.startswith("step 1: loss: ") for problem in outcome.problems)
    assert "on rank 1" in outcome.first_difference


@pytest.mark.slow
def test_a_gradient_that_is_not_added_over_the_ranks_of_a_sequence(shared):
    """They are copies of the weights, as replicas are."""

    def reduces(node: Node) -> bool:
        return (
            node.op == "AllReduce"
            and node.primal.get("mirror_user_id", node.attributes.get("mirror_user_id")) == WEIGHT
        )

    graphs = [tampered(graph, reduces, lambda node: [replace(node, op="TensorMove")]) for graph in shared.graphs]
    assert any(WEIGHT in problem for problem in judged(shared, graphs).problems)


def test_what_is_asked_for_otherwise_is_told(shared):
    sizes = {"context_parallel_algo": "ulysses_cp"}
    other = shared.config.model_copy(update={"parallel_config": shared.config.parallel_config.model_copy(update=sizes)})
    found = {finding.what: finding for finding in findings(other, shared.graphs)}
    assert not found["sequences"].holds
    assert (
        found["sequences"].problems[0] == "ranks 0-1: attention of layer 0 has no AlltoAll over ranks of its sequence"
    )
