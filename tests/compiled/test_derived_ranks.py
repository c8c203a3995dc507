"""Ranks derived from others: what they must be, and that nothing is derived where the rule does not hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execute_clusters import compiled_cluster
from small_cluster import cluster_run

from mindllm.compiled.graph.compiled_graph import (
    CONSTANT,
    ClosureType,
    CompiledGraph,
    Function,
    Node,
    OtherType,
    Parameter,
    TensorType,
    groups_of,
)
from mindllm.compiled.rank import compile_ranks as subject
from mindllm.compiled.rank.derived_ranks import NotDerivable, derived, sample_of
from mindllm.parallel.layout import Mesh, model_group_name
from mindllm.parallel.parameter_layout import ParameterLayout

MESH = Mesh(data_parallel=4, model_parallel=4, pipeline_stage=2)
STAGE = range(16, 32)
TENSOR = TensorType((4, 8), "float32")


def test_the_sample_has_the_first_rank_its_neighbours_and_the_last():
    assert sample_of(MESH, 0) == (0, 4, 1, 15)
    assert sample_of(MESH, 1) == (16, 20, 17, 31)
    assert sample_of(Mesh(data_parallel=2), 0) == (0, 1)
    assert sample_of(Mesh(pipeline_stage=4), 2) == (2,)


def test_ranks_groups_peers_and_offsets_are_those_of_a_rank_that_was_compiled():
    compiled = {rank: _graph(rank) for rank in STAGE}
    found = derived(MESH, 1, {rank: compiled[rank] for rank in sample_of(MESH, 1)})
    assert sorted(found) == sorted(set(STAGE) - {16, 17, 20, 31})
    for rank, graph in found.items():
        assert _facts(graph) == _facts(compiled[rank])
    everyone = {**{rank: compiled[rank] for rank in sample_of(MESH, 1)}, **found}
    names = {(name, ranks) for graph in everyone.values() for name, ranks in graph.groups.items()}
    assert len(names) == len({ranks for _, ranks in names})  # or members of a group would wait for each other


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        (lambda graph: _with_attribute(graph, "dst_global_rank", 3), "rank 31 is not what its neighbours say"),
        (lambda graph: _with_attribute(graph, "factor", 0.5), "rank 31 is not what its neighbours say"),
        (lambda graph: replace(graph, functions=(_shorter(graph.step),)), "rank 16 has 4 operators, rank 31 3"),
        (lambda graph: _with_scope(graph, "Default/other"), "rank 16 and rank 31 differ"),
    ],
)
def test_nothing_is_derived_where_the_last_rank_is_another(planted, why):
    compiled = {rank: _graph(rank) for rank in sample_of(MESH, 1)}
    compiled[31] = planted(compiled[31])
    with pytest.raises(NotDerivable, match=why):
        derived(MESH, 1, compiled)


def test_a_number_that_is_none_of_ranks_is_not_derived():
    compiled = {rank: _with_attribute(_graph(rank), "factor", float(rank)) for rank in sample_of(MESH, 1)}
    with pytest.raises(NotDerivable, match=r"factor 16\.0 is 20\.0 elsewhere"):
        derived(MESH, 1, compiled)


def test_groups_that_the_model_has_itself_have_the_names_that_it_gives_them():
    compiled = {rank: _of_own_groups(_graph(rank)) for rank in STAGE}
    found = derived(MESH, 1, {rank: compiled[rank] for rank in sample_of(MESH, 1)})
    assert len(found) == 12
    for rank, graph in found.items():
        (name,) = (node.attributes["group"] for node in graph.nodes() if node.op == "AllReduce")
        assert name == model_group_name(MESH.ranks_along("dp", rank))
        assert graph.groups[name] == MESH.ranks_along("dp", rank)


def test_a_group_of_the_model_with_another_name_is_not_derived():
    compiled = {rank: _of_own_groups(_graph(rank)) for rank in sample_of(MESH, 1)}
    compiled[31] = _of_own_groups(_graph(31), "4-own-1")
    with pytest.raises(NotDerivable, match=r"rank 31 is not what its neighbours say: group '4-own-1'"):
        derived(MESH, 1, compiled)


def test_names_of_forward_operators_are_numbered_by_the_compiler():
    """What counts is that two operators have two names on each rank, or one on each, of the same kind of operator."""
    compiled = {rank: _with_forward_names(_graph(rank), 100 * rank, 100 * rank + 7) for rank in STAGE}
    assert len(derived(MESH, 1, {rank: compiled[rank] for rank in sample_of(MESH, 1)})) == 12
    compiled[31] = _with_forward_names(_graph(31), 3100, 3100)
    with pytest.raises(NotDerivable, match="rank 16 and rank 31 differ"):
        derived(MESH, 1, {rank: compiled[rank] for rank in sample_of(MESH, 1)})
    compiled[31] = _with_forward_names(_graph(31), 3100, 3107, "Cast")
    with pytest.raises(NotDerivable, match="rank 16 and rank 31 differ"):
        derived(MESH, 1, {rank: compiled[rank] for rank in sample_of(MESH, 1)})


def test_an_array_that_is_another_is_told_in_a_few_words():
    compiled = {
        rank: _with_attribute(_graph(rank), "table", np.full((2, 8), rank, np.int32 if rank < 20 else np.float32))
        for rank in sample_of(MESH, 1)
    }
    told = r"table int32 \[2, 8\] that begins with 16 is float32 \[2, 8\] that begins with 20 elsewhere$"
    with pytest.raises(NotDerivable, match=told):
        derived(MESH, 1, compiled)


def test_experts_cut_the_replicas_that_share_them_into_groups():
    assert sample_of(Mesh(data_parallel=16, expert_parallel=8), 0) == (0, 8, 1, 15)
    assert sample_of(Mesh(data_parallel=4, model_parallel=2, expert_parallel=8, expert_model_parallel=1), 0) == (
        0,
        2,
        1,
        7,
    )
    assert sample_of(Mesh(data_parallel=6, expert_parallel=4), 0) == (0, 1, 5)  # one view cuts across the other


EXPERTS = {"expert_num": 8, "num_experts_chosen": 2, "capacity_factor": 1.5}
CLUSTERS = {
    "stages": ({"dp": 4, "pp": 2, "micro": 2}, (0, 1, 3, 4, 5, 7), (2, 6)),
    "matrices of experts made orthogonal": (
        {"dp": 4, "tp": 2, "expert_parallel": 2, "model": EXPERTS, "optimizer": {"type": "Muon"}},
        (0, 1, 2, 4, 7),
        (3, 5, 6),
    ),
    "groups of experts": ({"dp": 8, "expert_parallel": 4, "model": EXPERTS}, (0, 1, 4, 7), (2, 3, 5, 6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_derived_rank_is_the_one_that_the_compiler_makes(name, tmp_path):
    keys, ranks, derived_ranks = CLUSTERS[name]
    config = cluster_run(**keys, parallel={"enable_parallel_optimizer": True})
    with subject.RankCompilation(config, tmp_path, every_rank=False) as compilation:
        few = compilation.graphs()
    assert (compilation.ranks, compilation.derived, compilation.refused) == (ranks, derived_ranks, {})
    with subject.RankCompilation(config, tmp_path) as compilation:
        every = compilation.graphs()
    assert [_facts(graph) for graph in few] == [_facts(graph) for graph in every]


def test_ranks_of_a_stage_that_cannot_be_derived_are_compiled(graph_cache, monkeypatch):
    cluster = compiled_cluster("biased", graph_cache)  # all of its ranks are kept

    def refuse(*_):
        raise NotDerivable("a reason")

    monkeypatch.setattr(subject, "derived", refuse)
    monkeypatch.setattr(subject, "sample_of", lambda mesh, stage: (0, 1, 2))
    with subject.RankCompilation(cluster.config, graph_cache, every_rank=False) as compilation:
        graphs = compilation.graphs()
    assert [graph.rank for graph in graphs] == [0, 1, 2, 3]
    assert (compilation.ranks, compilation.derived, compilation.refused) == ((0, 1, 2, 3), (), {0: "a reason"})


def _graph(rank: int) -> CompiledGraph:
    """A gather along tp, a message to the stage before, and a slice whose offset may be the same constant as its end."""
    tp, dp = MESH.ranks_along("tp", rank), MESH.ranks_along("dp", rank)
    of_tp, of_dp, pair = f"4-1{tp[0]}", f"4-2{dp[0]}", (rank - 16, rank)
    offset = 8 * tp.index(rank)
    ends = () if offset == 8 else (_constant("end", 8),)  # equal constants of a graph are one
    nodes = (
        *ends,
        _constant("offset", offset),
        _node("AllGather", "gathered", ("given",), group=of_tp, group_rank_ids=tp, group_ranks="-".join(map(str, tp))),
        _node("AllReduce", "summed", ("gathered",), group=of_dp, group_rank_ids=dp),
        _node("Slice", "part", ("summed", "offset", "end" if ends else "offset")),
        _node(
            "Send",
            "sent",
            ("part",),
            group=f"2-{rank}9Send",
            group_rank_ids=pair,
            dst_global_rank=rank - 16,
            factor=2.0,
        ),
    )
    layout = ParameterLayout((4, 4), (0, -1), (16, 8), (4, 8), of_dp, dp)
    step = Function("step", nodes, (), "sent")
    groups = {of_tp: tp, of_dp: dp, f"2-{rank}9Send": pair}
    return CompiledGraph(rank, (step,), {"weight": Parameter("weight", "given", (1, 8), "float32", layout)}, groups)


def _node(op: str, name: str, inputs: tuple[str, ...], **attributes) -> Node:
    return Node(op, name, inputs, TENSOR, f"Default/{op}", attributes)


def _constant(name: str, value: int) -> Node:
    return Node(CONSTANT, name, (), OtherType("INT64"), "", {}, value=value)


def _facts(graph: CompiledGraph) -> list:
    """What a graph says, with constants where they are used, and groups by their ranks."""
    values = graph.constants
    operators = [
        (
            node.op,
            node.scope,
            len(node.type.names) if isinstance(node.type, ClosureType) else node.type,  # numbered by the compiler
            tuple(repr(values[name]) for name in node.inputs if name in values),
            {name: value for name, value in node.attributes.items() if name not in ("group", "group_back")},
        )
        for node in graph.nodes()
        if node.op != CONSTANT
    ]
    layouts = [
        (item.name, item.shape, item.layout and replace(item.layout, optimizer_group=""))
        for item in graph.parameters.values()
    ]
    return [graph.rank, operators, layouts, sorted(graph.groups.values())]


def _with_attribute(graph: CompiledGraph, name: str, value) -> CompiledGraph:
    *others, last = graph.step.nodes
    nodes = (*others, replace(last, attributes={**last.attributes, name: value}))
    return replace(graph, functions=(replace(graph.step, nodes=nodes),))


def _of_own_groups(graph: CompiledGraph, name: str = "") -> CompiledGraph:
    """Its sum is over a group that the model has made, and named."""
    ranks = MESH.ranks_along("dp", graph.rank)
    own = name or model_group_name(ranks)
    nodes = [
        replace(node, attributes={**node.attributes, "group": own}) if node.op == "AllReduce" else node
        for node in graph.step.nodes
    ]
    parameters = {"weight": replace(graph.parameters["weight"], layout=None)}
    functions = (replace(graph.step, nodes=tuple(nodes)),)
    return replace(graph, functions=functions, parameters=parameters, groups=groups_of(functions))


def _with_forward_names(graph: CompiledGraph, first: int, second: int, operator: str = "Mul") -> CompiledGraph:
    *others, one, other = graph.step.nodes
    named = (
        replace(one, primal={"forward_node_name": f"Mul_{first}"}),
        replace(other, primal={"forward_node_name": f"{operator}_{second}"}),
    )
    return replace(graph, functions=(replace(graph.step, nodes=(*others, *named)),))


def _with_scope(graph: CompiledGraph, scope: str) -> CompiledGraph:
    *others, last = graph.step.nodes
    return replace(graph, functions=(replace(graph.step, nodes=(*others, replace(last, scope=scope))),))


def _shorter(step: Function) -> Function:
    return replace(step, nodes=step.nodes[:-1], output=step.nodes[-2].name)
