"""Estimated peak memory: lives of tensors on graphs small enough to count by hand, and properties on compiled ones."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cluster import cluster_run

from mindllm.compiled.graph.compiled_graph import (
    ClosureType,
    CompiledGraph,
    Function,
    Input,
    Node,
    Parameter,
    TensorType,
    TupleType,
)
from mindllm.compiled.graph.execution_order import execution_order
from mindllm.compiled.graph.liveness import estimate, pool_size
from mindllm.compiled.graph.unrolled import unroll
from mindllm.compiled.simulation import estimate_rank
from mindllm.compiled.simulation.simulate_rank import simulate_rank

ALL = {"dp": 2, "tp": 2, "pp": 2, "micro": 2, "parallel": {"enable_parallel_optimizer": True}, "use_seq_parallel": True}
VECTOR = TensorType((1024,), "float32")
BLOCK = 4096 + 512


def node(op, name, *inputs, kind=VECTOR, callee="", **attributes):
    return Node(op, name, inputs, kind, f"Default/{op}-op0", attributes, callee=callee)


def graph_of(*functions, parameters=()):
    held = {name: Parameter(name, name, (1024,), "float32") for name in parameters}
    return CompiledGraph(0, functions, held, {})


def step(output, *nodes):
    return Function("step", nodes, (Input("x", VECTOR),), output)


def test_a_chain_keeps_two_tensors_alive():
    graph = graph_of(step("c", node("Exp", "a", "x"), node("Exp", "b", "a"), node("Exp", "c", "b")), parameters=["w"])
    memory = estimate(graph)
    assert memory.over_time == (3 * BLOCK,) * 3  # the weight, what is read, what is written
    assert memory.peak == 3 * BLOCK
    assert sum(block.size for block in memory.alive(memory.peak_time)) == memory.peak


def test_what_is_used_late_stays_alive():
    nodes = [node("Exp", "a", "x"), node("Exp", "b", "a"), node("Exp", "c", "b"), node("Add", "d", "c", "a")]
    assert estimate(graph_of(step("d", *nodes))).over_time == (2 * BLOCK, 2 * BLOCK, 3 * BLOCK, 3 * BLOCK)


def test_views_and_in_place_operators_make_nothing():
    view = node("Reshape", "b", "a", kind=TensorType((32, 32), "float32"))
    written = node("AssignAdd", "c", "w", "b")
    memory = estimate(graph_of(step("c", node("Exp", "a", "x"), view, written), parameters=["w"]))
    assert [block.name for block in memory.blocks if block.kind == "output"] == ["Default/Exp-op0"]
    assert memory.over_time == (3 * BLOCK, 2 * BLOCK)


@pytest.mark.parametrize(("shape", "outputs"), [((8, 1, 512, 1), 1), ((8, 2, 512, 1), 2)])
def test_a_transposition_that_moves_nothing_is_a_view(shape, outputs):
    order = Node("Constant", "order", (), TupleType(()), "", {}, value=(0, 2, 1, 3))
    turned = TensorType(tuple(shape[axis] for axis in order.value), "float32")
    nodes = [
        order,
        node("Exp", "a", "x", kind=TensorType(shape, "float32")),
        node("Transpose", "b", "a", "order", kind=turned),
    ]
    memory = estimate(graph_of(step("b", *nodes)))
    assert sum(block.kind == "output" for block in memory.blocks) == outputs


def test_what_a_forward_call_keeps_lives_until_its_backward_call():
    closure = ClosureType(("saved",))
    forward = Function(
        "▸cell",
        (
            node("Exp", "f1", "fx"),
            node("Exp", "f2", "f1"),
            node("Partial", "saved", "◂cell", "f1", kind=closure),
            node("MakeTuple", "both", "f2", "saved", kind=TupleType((VECTOR, closure))),
        ),
        (Input("fx", VECTOR),),
        "both",
    )
    backward = Function("◂cell", (node("Mul", "g", "kept", "dy"),), (Input("kept", VECTOR), Input("dy", VECTOR)), "g")
    zero, one = (Node("Constant", f"i{i}", (), TensorType((), "int64"), "", {}, value=i) for i in (0, 1))
    top = step(
        "gradient",
        zero,
        one,
        node("Call", "called", "x", callee="▸cell", kind=TupleType((VECTOR, closure))),
        node("TupleGetItem", "y", "called", "i0"),
        node("TupleGetItem", "back", "called", "i1", kind=closure),
        node("Exp", "dy", "y"),
        node("Call", "gradient", "dy", callee="back"),
    )
    unrolled = unroll(graph_of(top, forward, backward))
    assert [operation.node.name for operation in unrolled.operations] == ["f1", "f2", "dy", "g"]
    lives = {
        block.node.name: (block.start, block.end)
        for block in estimate(graph_of(top, forward, backward)).blocks
        if block.node
    }
    assert lives == {"f1": (0, 3), "f2": (1, 2), "dy": (2, 3), "g": (3, 3)}


def test_on_a_cpu_a_branch_holds_what_it_was_given():
    closure = ClosureType(("taken",))
    update = Function("✓update", (node("Exp", "u1", "given"), node("Exp", "u2", "u1")), (Input("given", VECTOR),), "u2")
    skip = Function("✗update", (), (), "x")
    top = step(
        "done",
        node("Exp", "a", "x"),
        node("Partial", "taken", "✓update", "a", kind=closure),
        node("Switch", "choice", "x", "taken", "taken", kind=closure),
        node("Call", "done", callee="choice"),
    )
    graph = graph_of(top, update, skip)
    ends = {on_cpu: {b.node.name: b.end for b in estimate(graph, on_cpu).blocks if b.node} for on_cpu in (False, True)}
    assert ends == {False: {"a": 1, "u1": 2, "u2": 2}, True: {"a": 2, "u1": 2, "u2": 2}}


def test_users_of_an_exchange_wait_for_everything_else():
    exchange = node("AllReduce", "sum", "a", group="g")
    nodes = [
        node("Exp", "a", "x"),
        exchange,
        node("Exp", "of_sum", "sum"),
        node("Exp", "b", "a"),
        node("Exp", "c", "b"),
    ]
    order = [n.name for n in execution_order(step("all", *nodes, node("AddN", "all", "of_sum", "c")))]
    assert order.index("of_sum") > order.index("c")


def test_a_cast_that_waits_for_nothing_runs_shortly_before_its_product():
    layers, previous = [], "x"
    for layer in range(3):
        cast = node("Cast", f"cast{layer}", f"w{layer}")
        layers += [cast, node("MatMul", f"y{layer}", previous, cast.name)]
        previous = f"y{layer}"
    order = [n.name for n in execution_order(step("y2", node("Exp", "first", "x"), *layers))]
    assert order.index("cast2") > order.index("y0")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 25))
def test_every_order_is_one_in_which_inputs_come_first(seed, size):
    draw = random.Random(seed)
    names = ["x"]
    nodes = []
    for number in range(size):
        op = draw.choice(["Exp", "Add", "AllReduce", "Depend", "MakeTuple"])
        nodes.append(node(op, f"n{number}", *draw.choices(names, k=draw.randint(1, 3)), fusion=draw.randint(0, 1)))
        names.append(f"n{number}")
    nodes.append(node("AddN", "out", *names))
    order = execution_order(step("out", *nodes))
    assert sorted(n.name for n in order) == sorted(n.name for n in nodes)
    seen = {"x"}
    for n in order:
        assert seen.issuperset(n.inputs)
        seen.add(n.name)


def test_sizes_are_rounded_as_the_pool_does():
    assert pool_size(TensorType((), "float32")) == 512
    assert pool_size(TensorType((120,), "float32")) == 512  # 480 and 32 more
    assert pool_size(TensorType((121,), "float32")) == 1024


@pytest.mark.compiles("all", "interleaved first", "one device")
def test_compiled_graphs_run_every_call_and_keep_to_bounds(compiled):
    for name, attention in (("all", 2), ("interleaved first", 8), ("one device", 3)):
        graph = compiled(name)
        operations = unroll(graph).operations
        assert sum(operation.node.op == "FlashAttentionScore" for operation in operations) == attention
        memory = estimate(graph)
        parameters = sum(math.prod(p.shape) for p in graph.parameters.values() if p.dtype == "float32") * 4
        everything = sum(block.size for block in memory.blocks)
        assert parameters < memory.peak < everything
        assert sum(block.size for block in memory.alive(memory.peak_time)) == memory.peak


@pytest.mark.compiles("all")
def test_an_estimate_tells_what_a_simulation_does(compiled, monkeypatch):
    """The configuration of the case has no layers of other stages to leave out."""
    monkeypatch.setattr(estimate_rank, "compile_rank", lambda config, rank, timeout: compiled("all"))
    estimated = estimate_rank.estimate_rank(cluster_run(**ALL), 6)
    assert estimated.stage == 1
    assert "estimated" in estimated.messages[0]
    assert estimated.used_peak == estimated.actual_peak == estimate(compiled("all")).peak
    assert max(used for _, used in estimated.memory_over_time()) == estimated.used_peak
    assert sum(estimated.peak_by_category().values()) == estimated.used_peak
    moved = [(c.operator, c.peer) for c in estimated.collectives if c.peer is not None]
    assert moved == [("Receive", 2), ("Send", 2)] * 2
    assert all(c.sent or c.received for c in estimated.collectives)


@pytest.mark.slow
def test_the_estimate_is_within_two_per_cent_of_the_dry_run():
    run = {
        **ALL,
        "model": {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "seq_length": 256},
    }
    for rank in (0, 6):
        simulated = simulate_rank(cluster_run(**run), rank)
        estimated = estimate_rank.estimate_rank(cluster_run(**run), rank)
        assert estimated.used_peak == pytest.approx(simulated.used_peak, rel=0.02)
        assert Counter(c.operator for c in estimated.collectives) == Counter(c.operator for c in simulated.collectives)
