"""Mistakes planted into compiled graphs, as a wrong strategy or a wrong compiler would make them: each is caught and placed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execute_clusters import Compiled, compiled_cluster, judged, tampered

from mindllm.compiled.execute.exchange import Deadlock
from mindllm.compiled.graph import CONSTANT, CompiledGraph, Node, OtherType

WEIGHT = "model.layers.1.feed_forward.w2.weight"
OUTPUT = "layers-CellList/0-DecoderLayer/attention-Attention/wo-Linear"


@pytest.fixture(scope="module")
def biased(graph_cache) -> Compiled:
    return compiled_cluster("biased", graph_cache)


@pytest.fixture(scope="module")
def tied(graph_cache) -> Compiled:
    return compiled_cluster("tied", graph_cache)


def everywhere(cluster: Compiled, where, change) -> list[CompiledGraph]:
    return [tampered(graph, where, change) for graph in cluster.graphs]


def reduces_gradient(node: Node) -> bool:
    """The sum of one weight's gradient over data-parallel ranks."""
    return node.op == "AllReduce" and node.primal.get("mirror_user_id", node.attributes.get("mirror_user_id")) == WEIGHT


def adds_heads(node: Node) -> bool:
    """The exchange behind the output projection of the first layer, in the forward pass."""
    return node.op == "ReduceScatter" and not node.backward and OUTPUT in node.scope


def dropped(node: Node) -> list[Node]:
    return [replace(node, op="TensorMove")]


def twice(node: Node) -> list[Node]:
    once = replace(node, name=f"{node.name}_once")
    return [once, replace(node, inputs=(once.name, *node.inputs[1:]))]


def times(node: Node, factor: float, operand: int = 0) -> list[Node]:
    """The node behind a multiplication of one operand."""
    constant = Node(CONSTANT, f"{node.name}_factor", (), OtherType("FLOAT"), "", {}, value=factor)
    operand_type = node.type
    product = Node("Muls", f"{node.name}_times", (node.inputs[operand], constant.name), operand_type, node.scope, {})
    inputs = list(node.inputs)
    inputs[operand] = product.name
    return [constant, product, replace(node, inputs=tuple(inputs))]


def biased_before_the_sum(graph: CompiledGraph) -> CompiledGraph:
    """The bias of the output projection and the exchange of the sum in the other order."""
    exchange = next(node for node in graph.nodes() if adds_heads(node))
    bias = next(node for node in graph.nodes() if exchange.name in node.inputs and node.op == "Add")
    before = replace(bias, name=exchange.name, inputs=(exchange.inputs[0], bias.inputs[1]), type=OtherType("any"))
    after = replace(exchange, name=bias.name, inputs=(exchange.name,))
    without = tampered(graph, lambda node: node.name == exchange.name, lambda node: [])
    return tampered(without, lambda node: node.name == bias.name, lambda node: [before, after])


@pytest.mark.parametrize("name", ["biased", "tied"])
def test_healthy_clusters_pass_and_nothing_is_suspected(name, graph_cache):
    from toolkit.cluster_check.locate import NOWHERE, locate

    cluster = compiled_cluster(name, graph_cache)
    outcome = judged(cluster)
    assert outcome.ok, outcome.problems
    assert all(all(item.cluster.overflows) for item in outcome.comparisons if item.single.overflow)
    assert locate(cluster.config, cluster.graphs, cluster.reference, 0, cluster.cache) == NOWHERE


def test_a_dropped_gradient_reduction(biased):
    outcome = judged(biased, everywhere(biased, reduces_gradient, dropped))
    assert not outcome.ok
    assert any(WEIGHT in problem for problem in outcome.problems)
    assert (
        "that operand was not added over ranks 0, 2" in outcome.first_difference
    )  # the data-parallel neighbours of rank 0
    assert "feed_forward-FeedForward/w2-Linear" in outcome.first_difference


def test_a_doubled_gradient_reduction(biased):
    outcome = judged(biased, everywhere(biased, reduces_gradient, twice))
    assert any(WEIGHT in problem for problem in outcome.problems)
    assert outcome.first_difference.startswith("AllReduce on rank 0 at Gradients/")


def test_a_wrong_tensor_parallel_reduction(biased):
    largest = lambda node: [replace(node, attributes={**node.attributes, "op": "max"})]  # noqa: E731
    outcome = judged(biased, everywhere(biased, adds_heads, largest))
    assert any(problem.startswith("step 1: loss: ") for problem in outcome.problems)
    assert outcome.first_difference.startswith("ReduceScatter on rank 0 at ")
    assert OUTPUT in outcome.first_difference


def test_a_missing_tensor_parallel_reduction_names_operator_strategy_and_source(biased):
    """The exchange of the sum is replaced by the rank's own rows of its part."""

    def own_rows(node: Node) -> list[Node]:
        ranks = node.ranks
        own = ranks.index(graph.rank)
        rows, width = node.shapes[0]
        constants = {"begin": (own * rows, 0), "end": ((own + 1) * rows, width), "strides": (1, 1)}
        values = [
            Node(CONSTANT, f"{node.name}_{name}", (), OtherType("TUPLE"), "", {}, value=value)
            for name, value in constants.items()
        ]
        inputs = (node.inputs[0], *(value.name for value in values))
        return [*values, replace(node, op="StridedSlice", inputs=inputs, attributes={})]

    graphs = []
    for graph in biased.graphs:
        graphs.append(tampered(graph, adds_heads, own_rows))
    outcome = judged(biased, graphs)
    assert outcome.first_difference.startswith("Add on rank 0 at ")
    assert "strategy ((4, 1), (1,))" in outcome.first_difference
    assert "linear.py:" in outcome.first_difference
    assert "MatMul" in outcome.first_difference
    assert "that operand was not added over ranks 0, 1" in outcome.first_difference


def test_a_bias_added_on_every_tensor_parallel_rank(biased):
    """Added before the sum instead of after it: it counts as often as there are ranks."""
    outcome = judged(biased, [biased_before_the_sum(graph) for graph in biased.graphs])
    assert any(problem.startswith("step 1: loss: ") for problem in outcome.problems)
    assert "attention-Attention/wo-Linear" in outcome.first_difference


def test_a_constant_folded_with_the_wrong_group_size(biased):
    """What the compiler does to the sum of a constant when it takes the group of nobody for its own."""
    fold = lambda node: [*times(node, 1024.0)[:2], replace(node, inputs=(f"{node.name}_times",))]  # noqa: E731
    outcome = judged(biased, everywhere(biased, reduces_gradient, fold))
    assert any("global norm" in problem for problem in outcome.problems)
    assert "its operand is from AllReduce at Gradients/" in outcome.first_difference
    assert "feed_forward-FeedForward/w2-Linear" in outcome.first_difference


def test_a_wrong_order_of_ranks(biased):
    """Parts of a sequence gathered in the wrong order."""
    gathers = lambda node: node.op == "AllGather" and not node.backward and "0-DecoderLayer" in node.scope  # noqa: E731
    swap = lambda node: [  # noqa: E731
        replace(node, attributes={**node.attributes, "group_rank_ids": tuple(reversed(node.ranks))})
    ]
    outcome = judged(biased, everywhere(biased, gathers, swap))
    assert any(problem.startswith("step 1: loss: ") for problem in outcome.problems)
    assert "0-DecoderLayer" in outcome.first_difference


def test_a_mis_scaled_accumulation(tied):
    accumulates = lambda node: node.op == "AssignAdd" and node.inputs[0].endswith(f"accu_grads.{moved}")  # noqa: E731
    moved = "model.layers.1.attention.wq.weight"
    graphs = [*tied.graphs]
    graphs[1] = tampered(graphs[1], accumulates, lambda node: times(node, 0.5, operand=1))
    outcome = judged(tied, graphs)
    assert any(moved in problem for problem in outcome.problems)


def test_a_tied_embedding_whose_stages_disagree(tied):
    """The last stage uses its own copy instead of what the first stage sends: right in the first step, stale afterwards."""
    word = "tok_embeddings.embedding_weight"
    exchanged = lambda node: node.op in ("Send", "Receive") and not node.backward and node.inputs[0].endswith(word)  # noqa: E731
    graphs = [tampered(graph, exchanged, dropped) for graph in tied.graphs]
    outcome = judged(tied, graphs)
    assert outcome.comparisons[0].problems() == []
    assert outcome.problems[0].startswith("step 5: loss: ")
    assert outcome.first_difference


def test_ranks_that_wait_for_each_other_are_named(tied):
    """The first stage receives a gradient under a tag nobody sends."""
    receives = lambda node: node.op == "Receive" and node.backward  # noqa: E731
    retag = lambda node: [replace(node, attributes={**node.attributes, "sr_tag": 77})]  # noqa: E731
    graphs = [tampered(tied.graphs[0], receives, retag), tied.graphs[1]]
    with pytest.raises(Deadlock, match=r"rank 0 waits in Receive from rank 1 at Gradients/") as error:
        judged(tied, graphs)
    assert "rank 1" in str(error.value)


def test_gradients_that_are_not_clipped(biased):
    """The factor is one whatever the norm is."""
    clips = lambda node: node.op == "Minimum"  # noqa: E731
    graphs = everywhere(biased, clips, lambda node: [replace(node, op="Depend", inputs=node.inputs[1:])])
    outcome = judged(biased, graphs)
    assert any(problem.startswith("step 1: adam_m.") for problem in outcome.problems)
    assert not any("global norm" in problem for problem in outcome.problems)


def test_a_norm_that_decays(biased):
    """Weights of norms belong to the group without decay."""
    norm = "model.norm_out.weight"
    constant = Node(CONSTANT, "planted_decay", (), OtherType("FLOAT"), "", {}, value=0.01)
    updates = lambda node: node.op == "AdamWeightDecay" and node.inputs[0].endswith(f":{norm}")  # noqa: E731
    decay = lambda node: [constant, replace(node, inputs=(*node.inputs[:7], constant.name, *node.inputs[8:]))]  # noqa: E731
    outcome = judged(biased, everywhere(biased, updates, decay))
    assert outcome.problems[0].startswith(f"step 1: {norm} on rank ")


def test_a_weight_that_no_rank_updates(biased):
    """No operator's value is wrong before the update; the weight is."""
    updates = lambda node: node.op == "AdamWeightDecay"  # noqa: E731
    graphs = everywhere(biased, updates, lambda node: [replace(node, op="Depend")])
    outcome = judged(biased, graphs)
    assert not outcome.ok
    assert np.isfinite(outcome.comparisons[0].cluster.loss)
