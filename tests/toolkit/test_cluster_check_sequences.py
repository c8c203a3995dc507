"""Two devices that share each sequence: healthy they pass, and mistakes in what follows the split are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from execute_clusters import Compiled, compiled_cluster, judged, tampered

from mindllm.compiled.asked_for import findings
from mindllm.compiled.graph import CompiledGraph, Node

WEIGHT = "model.layers.1.feed_forward.w2.weight"
ATTENTION = ("FlashAttentionScore", "FlashAttentionScoreGrad")


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


def test_a_causal_mask_that_is_not_shifted(shared):
    """The second rank's queries see what those of the first one may see."""
    first, second = shared.graphs
    cores = [next(node for node in graph.nodes() if node.op == ATTENTION[0]) for graph in (first, second)]
    values = [scalars(graph, core) for graph, core in zip((first, second), cores, strict=True)]
    assert values[0] != values[1], "the ranks' masks are told by number"
    constants = {name: value for name, value in zip(cores[1].inputs, values[0], strict=True) if value is not None}

    def as_the_first(node: Node) -> list[Node]:
        own = scalars(second, node)
        inputs, added = list(node.inputs), []
        for place, (mine, before) in enumerate(zip(values[1], values[0], strict=True)):
            if mine != before:
                (where,) = [index for index, value in enumerate(own) if value == mine]
                constant = Node(
                    "Constant", f"{node.name}_{place}", (), next(iter(second.nodes())).type, "", {}, value=before
                )
                inputs[where], added = constant.name, [*added, constant]
        return [*added, replace(node, inputs=tuple(inputs))]

    assert constants
    outcome = judged(shared, [first, tampered(second, lambda node: node.op in ATTENTION, as_the_first)])
    assert any(problem.startswith("step 1: loss: ") for problem in outcome.problems)
    assert "FlashAttentionScore on rank 1" in outcome.first_difference


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
