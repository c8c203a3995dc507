"""Mistakes planted into compiled graphs, as a wrong strategy or a wrong compiler would make them: each is caught and placed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execute_clusters import REAL, Compiled, compiled_cluster, judged, tampered

from mindllm.architecture.optimizer_state import SHARES
from mindllm.compiled.execute.exchange import Deadlock
from mindllm.compiled.graph.compiled_graph import CONSTANT, CompiledGraph, Node, OtherType
from mindllm.models.experts.expert_load import PROBE
from mindllm.verify.locate import LARGE_LOGITS
from mindllm.verify.side import CLIPPING
from mindllm.verify.single import LOSS_SCALE

WEIGHT = "model.layers.1.feed_forward.w2.weight"
EXPERTS = "model.layers.1.feed_forward.experts.w1.weight"
OUTPUT = "layers-CellList/0-DecoderLayer/attention-Attention/wo-Linear"


@pytest.fixture(scope="module")
def biased(graph_cache) -> Compiled:
    return compiled_cluster("biased", graph_cache)


@pytest.fixture(scope="module")
def tied(graph_cache) -> Compiled:
    return compiled_cluster("tied", graph_cache)


@pytest.fixture(scope="module")
def tied_real(graph_cache) -> Compiled:
    return compiled_cluster(f"tied {REAL}", graph_cache)


def beginning(graph: CompiledGraph, where, change) -> CompiledGraph:
    """A copy of a graph in which parameters whose name ``where`` is true of begin otherwise."""
    changed = {
        name: replace(parameter, initial=change(parameter.initial)) if where(name) else parameter
        for name, parameter in graph.parameters.items()
    }
    assert changed != graph.parameters or any(map(where, changed))
    return replace(graph, parameters=changed)


def everywhere(cluster: Compiled, where, change) -> list[CompiledGraph]:
    return [tampered(graph, where, change) for graph in cluster.graphs]


def reduces_gradient(node: Node) -> bool:
    """The sum of one weight's gradient over data-parallel ranks."""
    return node.op == "AllReduce" and node.primal.get("mirror_user_id", node.attributes.get("mirror_user_id")) == WEIGHT


def adds_heads(node: Node) -> bool:
    """The exchange behind the output projection of the first layer, in the forward pass."""
    return node.op == "ReduceScatter" and not node.backward and OUTPUT in node.scope


def reduces_expert_gradient(node: Node) -> bool:
    """The sum of the gradient of some experts over the replicas that have the same ones."""
    return (
        node.op == "AllReduce" and node.primal.get("mirror_user_id", node.attributes.get("mirror_user_id")) == EXPERTS
    )


def numbers_experts(node: Node) -> bool:
    """Experts counted from the first one of the rank, where ranks share them and tokens are sorted."""
    return node.op == "Sub" and "shared-SharedExperts" in node.scope


def adds_gradients_of_tokens(node: Node) -> bool:
    """Gradients of the tokens that ranks gathered, for those that had them."""
    return node.op == "ReduceScatter" and "shared-SharedExperts/Grad_AllGather" in node.scope


def dropped(node: Node) -> list[Node]:
    return [replace(node, op="TensorMove")]


def twice(node: Node) -> list[Node]:
    once = replace(node, name=f"{node.name}_once")
    return [once, replace(node, inputs=(once.name, *node.inputs[1:]))]


def emptied(node: Node) -> list[Node]:
    """What the node yields, times zero."""
    return yielding(node, 0.0)


def yielding(node: Node, factor: float) -> list[Node]:
    """What the node yields, times a factor."""
    constant = Node(CONSTANT, f"{node.name}_factor", (), OtherType("FLOAT"), "", {}, value=factor)
    before = replace(node, name=f"{node.name}_before")
    return [before, constant, Node("Muls", node.name, (before.name, constant.name), node.type, node.scope, {})]


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


@pytest.mark.slow
def test_a_gradient_of_experts_that_is_not_added_over_their_replicas(graph_cache):
    cluster = compiled_cluster("experts", graph_cache)
    assert judged(cluster).ok
    assert all(
        node.ranks in ((0, 2), (1, 3))
        for graph in cluster.graphs
        for node in graph.nodes()
        if reduces_expert_gradient(node)
    )
    outcome = judged(cluster, everywhere(cluster, reduces_expert_gradient, dropped))
    assert any(EXPERTS in problem for problem in outcome.problems)


def reduces_counts(node: Node) -> bool:
    """The sum over ranks of the tokens of every expert."""
    name = str(node.primal.get("mirror_user_id", node.attributes.get("mirror_user_id", "")))
    return node.op == "AllReduce" and name.endswith(PROBE)


@pytest.mark.slow
def test_choices_of_a_global_batch_that_are_not_added_over_ranks(graph_cache):
    cluster = compiled_cluster("experts of global batches", graph_cache)
    assert judged(cluster).ok
    outcome = judged(cluster, everywhere(cluster, reduces_counts, dropped))
    assert not outcome.ok
    for name in (SHARES, PROBE):
        assert any(name in problem for problem in outcome.problems)


SORTED_TOKENS_FAULTS = {
    "the sum over replicas is missing": (reduces_expert_gradient, dropped),
    "experts are numbered from the first rank's": (numbers_experts, dropped),
    "gradients of gathered tokens are averaged": (adds_gradients_of_tokens, lambda node: yielding(node, 0.5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *SORTED_TOKENS_FAULTS])
def test_sorted_tokens_whose_ranks_do_not_do_what_they_must(fault, graph_cache):
    cluster = compiled_cluster("sorted experts", graph_cache)
    outcome = judged(cluster, everywhere(cluster, *SORTED_TOKENS_FAULTS[fault]) if fault else None)
    assert outcome.ok == (fault is None)
    assert fault is None or any("experts" in problem for problem in [*outcome.problems, outcome.first_difference])


@pytest.mark.parametrize("name", [pytest.param("biased", marks=pytest.mark.slow), "tied", f"tied {REAL}"])
def test_healthy_clusters_pass_and_nothing_is_suspected(name, graph_cache):
    from mindllm.verify.locate import NOT_IN_OPERATORS, locate

    cluster = compiled_cluster(name, graph_cache)
    outcome = judged(cluster)
    assert outcome.ok, outcome.problems
    assert all(all(item.cluster.overflows) for item in outcome.comparisons if item.single.overflow)
    if not name.endswith(REAL):
        assert locate(cluster.config, cluster.graphs, cluster.reference, 0, cluster.cache) == NOT_IN_OPERATORS


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
    assert outcome.problems[0].startswith("step 3: loss: ")
    assert outcome.first_difference


@pytest.mark.slow
def test_an_embedding_gradient_of_the_last_stage_that_is_not_added(graph_cache):
    """The first stage receives what layers that predict ahead have looked up, and adds nothing."""
    cluster = compiled_cluster("prediction", graph_cache)
    assert judged(cluster).ok
    table = "model.tok_embeddings.embedding_weight"
    shape = cluster.graphs[0].parameters[table].shape
    receives = lambda node: node.op == "Receive" and node.backward and shape in node.shapes  # noqa: E731
    assert any(map(receives, cluster.graphs[0].nodes()))
    outcome = judged(cluster, [tampered(cluster.graphs[0], receives, emptied), cluster.graphs[1]])
    assert any(table in problem for problem in outcome.problems)


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


def test_gradients_that_are_unscaled_by_a_constant(biased):
    """Right as long as the loss scale is that of the first step."""

    def fixed(graph: CompiledGraph) -> CompiledGraph:
        scale = graph.step.inputs[-1].name
        constant = Node(CONSTANT, "planted_scale", (), OtherType("FLOAT"), "", {}, value=np.float32(LOSS_SCALE))
        unscales = lambda node: node.op == "Mul" and scale in node.inputs  # noqa: E731
        swap = lambda node: tuple("planted_scale" if name == scale else name for name in node.inputs)  # noqa: E731
        return tampered(graph, unscales, lambda node: [constant, replace(node, inputs=swap(node))])

    outcome = judged(biased, [fixed(graph) for graph in biased.graphs])
    assert not any(problem.startswith("step 1:") for problem in outcome.problems)
    assert any(problem.startswith("step 5: global norm: ") for problem in outcome.problems)


def test_gradients_that_are_scaled_up_to_the_norm_they_may_have(biased):
    """The largest factor of clipping, which is one, is missing: no step that clips tells."""
    bounds = lambda node: node.op == "Minimum" and CLIPPING.search(node.scope) is not None  # noqa: E731
    outcome = judged(biased, everywhere(biased, bounds, dropped))
    assert all(problem.startswith("step 5: ") for problem in outcome.problems)
    assert any(problem.startswith("step 5: adam_m.model.norm_out.weight ") for problem in outcome.problems)
    assert "update-ApplyGradients" in outcome.first_difference


def test_exponents_whose_largest_logit_is_not_taken_off(biased):
    """No number tells while logits stay below 88."""
    largest = lambda node: node.instance == "max" and not node.backward  # noqa: E731
    outcome = judged(biased, everywhere(biased, largest, emptied))
    (problem,) = outcome.problems
    assert problem.startswith("step 3: loss: ")
    assert outcome.first_difference == LARGE_LOGITS


def test_a_weight_that_no_rank_updates(biased):
    """No operator's value is wrong before the update; the weight is."""
    updates = lambda node: node.op == "AdamWeightDecay"  # noqa: E731
    graphs = everywhere(biased, updates, lambda node: [replace(node, op="Depend")])
    outcome = judged(biased, graphs)
    assert not outcome.ok
    assert np.isfinite(outcome.comparisons[0].cluster.loss)


def local_flag(graph: CompiledGraph) -> CompiledGraph:
    """Whether gradients are finite is asked of the rank's own squares instead of the norm over all ranks."""
    reduction = next(node for node in graph.find("AllReduce") if "global_norm" in node.scope)
    shape = Node(CONSTANT, "planted_shape", (), OtherType("TUPLE"), "", {}, value=())

    def own(node: Node) -> list[Node]:
        local = Node("Reshape", "planted_local", (reduction.inputs[0], shape.name), OtherType("any"), node.scope, {})
        return [shape, local, replace(node, inputs=(local.name,))]

    return tampered(graph, lambda node: node.op == "IsFinite", own)


def test_an_overflow_that_only_the_ranks_that_have_it_notice(biased):
    """Gradients that overflow everywhere would not show it."""
    outcome = judged(biased, [local_flag(graph) for graph in biased.graphs])
    everywhere_, first, *_ = (item for item in outcome.comparisons if item.single.overflow)
    assert everywhere_.problems() == []
    assert first.cluster.overflows == (True, False, True, False)  # the head's part of two data-parallel neighbours
    assert outcome.problems[0].startswith(
        "step 3: overflow: True on a single device, [True, False, True, False] on the"
    )
    assert "MatMul on rank 0 at Gradients/" in outcome.problems[0]
    assert "must be reduced over all ranks" in outcome.first_difference


def test_rotary_tables_of_a_later_stage_with_another_base(tied):
    """Its angles are those of a base of 500 instead of 10,000."""
    width = tied.config.model.config.head_dim
    angles = np.outer(np.arange(32), 500.0 ** -(np.arange(0, width, 2) / width))
    tables = {
        f"rotary_{name}": function(np.concatenate([angles, angles], -1)).astype(np.float32)
        for name, function in (("cos", np.cos), ("sin", np.sin))
    }
    last = tied.graphs[1]
    for name, table in tables.items():
        last = beginning(last, lambda other, name=name: other.endswith(name), lambda _, table=table: table)
    outcome = judged(tied, [tied.graphs[0], last])
    assert outcome.problems[0].startswith("tables.1.contexts.0.rotary_cos on rank 1: off by ")
    assert outcome.problems[1].startswith("tables.1.contexts.0.rotary_sin on rank 1: off by ")
    assert outcome.problems[2].startswith("step 1: loss: ")


def test_a_causal_mask_that_is_inverted(tied):
    """In the compressed form, which only the fused attention of the ranks reads; a single device composes its own."""
    graphs = [
        beginning(graph, lambda name: name.endswith("attention_mask"), lambda mask: 1 - mask) for graph in tied.graphs
    ]
    outcome = judged(tied, graphs)
    assert outcome.problems[0].startswith("step 1: loss: ")
    assert outcome.first_difference.startswith("FlashAttentionScore on rank 0 at ")


def test_accumulators_that_do_not_begin_empty(tied):
    graphs = [beginning(graph, lambda name: name.startswith("accu_grads."), np.ones_like) for graph in tied.graphs]
    outcome = judged(tied, graphs)
    assert any(problem.startswith("step 1: global norm: ") for problem in outcome.problems)


def test_a_wrong_list_of_decays_in_the_dtype_of_the_yaml(tied_real):
    """On the stage whose optimizer has no embedding: every decay is that of the weight before."""
    norm, matrix = "model.layers.1.ffn_norm.weight", "model.layers.1.attention.wo.weight"
    updates = {
        name: next(n for n in tied_real.graphs[1].find("AdamWeightDecay") if n.inputs[0].endswith(f":{name}"))
        for name in (norm, matrix)
    }

    def otherwise(node: Node) -> list[Node]:
        return [replace(node, inputs=(*node.inputs[:7], updates[matrix].inputs[7], *node.inputs[8:]))]

    graphs = [tied_real.graphs[0], tampered(tied_real.graphs[1], lambda node: node == updates[norm], otherwise)]
    outcome = judged(tied_real, graphs)
    assert outcome.problems == (f"step 1: weight decay of {norm} on rank 1: 0.1, 0 on a single device",)
