"""What is kept of somebody's program: the ranks of groups that it made itself are those of the simulation."""

from mindllm.compiled.graph.compiled_graph import CompiledGraph, Function, Node, TensorType
from mindllm.compiled.simulation.simulation import Collective, Simulation
from mindllm.programs.kept import with_simulated_groups

VALUE = TensorType((4,), "float32")


def gather(name, group, ranks):
    return Node(
        "AllGather",
        name,
        ("x",),
        VALUE,
        f"Default/AllGather-{name}",
        {"group": group, "group_rank_ids": ranks, "rank_size": 2},
    )


def test_a_group_of_the_program_is_not_the_world():
    own, compiler = gather("op0", "own", tuple(range(8))), gather("op1", "2-77", (1, 3))
    graph = CompiledGraph(1, (Function("step", (own, compiler), (), "op1"),), {}, {})
    exchange = Collective(3, "Default/AllGather-op0", "AllGather", "own", (0, 1), None, "(4)", "Float32", 16, 32)
    simulation = Simulation(1, 0, 1, 1, 0, 0, (), (), (exchange,))
    corrected = with_simulated_groups(graph, simulation)
    assert [node.ranks for node in corrected.step.nodes] == [(0, 1), (1, 3)]
    assert corrected.groups == {"own": (0, 1), "2-77": (1, 3)}
    assert corrected.step.nodes[0].attributes["rank_size"] == 2
