"""Stages of anybody's program: which cells are its layers, what they repeat, what their operators take."""

from types import SimpleNamespace

import pytest

from mindllm.compiled.graph.compiled_graph import CompiledGraph, Function, Node, Parameter, TensorType
from mindllm.compiled.graph.cost import cost, uncounted
from mindllm.compiled.graph.operators import BACKWARD, FORWARD, RECOMPUTED
from mindllm.timing.costs.exchanges import Group, exchange_seconds
from mindllm.timing.costs.of_graph import operator_time
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.stage_graph import list_of_layers, micro_batches_of, number_in, stage_graphs

HALF_BYTES = TensorType((512, 512), "bfloat16")


def stage(*places):
    """Operators with these places, all of a forward pass."""
    return SimpleNamespace(nodes=places, place=lambda node: node, phase=lambda node: FORWARD)


def test_layers_are_the_list_with_most_members_on_all_stages():
    first = stage(
        "decoder.layers.0.attention", "decoder.layers.1.attention", "micro_inputs.0", "micro_inputs.1", "micro_inputs.2"
    )
    last = stage("decoder.layers.2.attention", *["mtp.layers.0.attention"] * 9)
    assert list_of_layers([first, last]) == "decoder.layers"
    assert list_of_layers([stage("embedding", "head")]) == ""
    assert number_in("decoder.layers.2.mlp.experts.7", "decoder.layers") == 2
    assert number_in("mtp.layers.0.attention", "decoder.layers") is None


def product(number, name, scope, **primal):
    attributes = {"recompute": True} if "duplicated" in primal else {}
    return Node(
        "MatMul",
        f"f:{name}",
        ("f:x", "f:x"),
        HALF_BYTES,
        f"{scope}net-Net/blocks-CellList/{number}-Block/MatMul-op{name}",
        attributes,
        primal,
    )


def graph(*nodes):
    x = Parameter("x", "f:x", HALF_BYTES.shape, HALF_BYTES.dtype)
    weights = {name: Parameter(name, f"f:{name}", shape, "float32") for name, shape in SHAPES.items()}
    return CompiledGraph(0, (Function("f", nodes, (), nodes[-1].name),), {"x": x, **weights}, {})


SHAPES = {
    "blocks.0.weight": (4, 4),
    "adam_m.blocks.0.weight": (4, 4),
    "blocks.1.weight": (4, 8),
    "adam_m.blocks.1.weight": (4, 8),
}


def test_times_and_layers_of_a_stage_without_a_pipeline():
    nodes = [product(0, "1", "Default/", unique_id="1"), product(1, "2", "Default/", unique_id="2")]
    nodes += [product(1, "3", "recompute_Default/", duplicated=True), product(1, "4", "Gradients/Default/")]
    (found,) = stage_graphs([graph(*nodes)], read_device(DEFAULT))
    one = found.passes[FORWARD] / 2
    assert found.passes[RECOMPUTED] == pytest.approx(one)
    assert found.passes[BACKWARD] == pytest.approx(one)
    assert (found.backward, found.micro_batches, found.chunks, found.once) == (pytest.approx(2 * one), 1, 1, 0)
    assert [(layer.number, layer.recompute) for layer in found.layers] == [(0, "none"), (1, "select")]
    assert found.layers[0].type != found.layers[1].type
    assert {name for name, _ in found.layers[0].type} == {"weight"}


def test_micro_batches_are_numbered_by_the_compiler():
    assert micro_batches_of(graph(product(0, "1", "Default/", micro=0), product(0, "2", "Default/", micro=3))) == 4


def repeated_layer(asked, left_out):
    forward = [
        product(0, str(number), "recompute_Default/" if number < asked else "Default/")
        for number in range(asked + left_out)
    ]
    return graph(*forward, product(0, "again", "recompute_Default/", duplicated=True))


@pytest.mark.parametrize(("asked", "left_out", "kind"), [(10, 0, "full"), (9, 1, "full"), (2, 8, "select")])
def test_a_layer_is_recomputed_as_a_whole_though_a_network_leaves_a_few_operators_out(asked, left_out, kind):
    (found,) = stage_graphs([repeated_layer(asked, left_out)], read_device(DEFAULT))
    assert [layer.recompute for layer in found.layers] == [kind]


def test_products_of_experts_are_counted_and_their_exchange_is_among_its_parts():
    tokens, weights = TensorType((64, 32), "bfloat16"), TensorType((4, 32, 48), "bfloat16")
    parts = TensorType((2,), "int64")
    inputs = {
        name: Parameter(name, f"f:{name}", kind.shape, kind.dtype)
        for name, kind in (("x", tokens), ("w", weights), ("n", parts))
    }
    grouped = Node(
        "GroupedMatmul",
        "f:g",
        ("f:x", "f:w"),
        TensorType((64, 48), "bfloat16"),
        "Default/net-Net/GroupedMatmul-op0",
        {},
    )
    ranks = {"group_rank_ids": tuple(range(64)), "group": "own"}
    exchange = Node("AlltoAllV", "f:a", ("f:x", "f:n"), tokens, "Default/net-Net/AlltoAllV-op0", ranks)
    compiled = CompiledGraph(0, (Function("f", (grouped, exchange), (), "f:a"),), inputs, {})
    assert cost(compiled, grouped).products == 2 * 64 * 32 * 48
    assert uncounted(compiled) == ()
    device = read_device(DEFAULT)
    expected = 1e3 * exchange_seconds("AlltoAllV", 64 * 32 * 2, Group(2), device)
    assert operator_time(compiled, exchange, device) == pytest.approx(expected, rel=1e-3)
