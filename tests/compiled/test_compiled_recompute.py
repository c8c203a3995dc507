"""Recomputation in compiled graphs: forward operators that really appear a second time. Layer 0 is marked, layer 1 is not."""

import pytest

FORWARD_OPERATORS = {"MatMul": 7, "RmsNorm": 2, "FlashAttentionScore": 1, "SiLU": 1}


def repeated(graph, number):
    """Names of the operators of a layer that the compiler marked as repeated."""
    return {node.op for node in graph.nodes() if node.recomputed and f".layers.{number}." in f"{node.path}."}


def in_layer(graph, number, op):
    return len(graph.find(op, lambda node: not node.backward and f".layers.{number}." in f"{node.path}."))


def counts(graph, number, ops=FORWARD_OPERATORS):
    return {op: in_layer(graph, number, op) for op in ops}


@pytest.mark.compiles("full", "tp2 sequence")
def test_full_recomputation_repeats_all_but_what_yields_the_output(compiled):
    assert counts(compiled("tp2 sequence"), 0) == FORWARD_OPERATORS
    assert counts(compiled("full"), 0) == {"MatMul": 7 + 6, "RmsNorm": 4, "FlashAttentionScore": 2, "SiLU": 2}
    assert counts(compiled("full"), 1) == FORWARD_OPERATORS


@pytest.mark.compiles("full", "full without communication")
def test_tensor_parallel_communication_is_repeated_on_request(compiled):
    exchanged = ("AllGather", "ReduceScatter")
    assert counts(compiled("full"), 0, exchanged) == {"AllGather": 4, "ReduceScatter": 3}
    assert counts(compiled("full without communication"), 0, exchanged) == {"AllGather": 2, "ReduceScatter": 2}


@pytest.mark.compiles("full without silu")
def test_excluded_operators_are_kept_inside_recomputed_layers(compiled):
    graph = compiled("full without silu")
    for number in (0, 1):
        assert in_layer(graph, number, "SiLU") == 1
        assert in_layer(graph, number, "FlashAttentionScore") == 2


@pytest.mark.compiles("select")
def test_selected_operators_alone_are_repeated(compiled):
    assert counts(compiled("select"), 0) == {**FORWARD_OPERATORS, "SiLU": 2}
    assert counts(compiled("select"), 1) == FORWARD_OPERATORS
    assert repeated(compiled("select"), 0) == {"SiLU", "Mul"}
    assert repeated(compiled("select"), 1) == set()
    products = [n for n in compiled("select").find("Mul") if not n.backward and n.path.endswith("0.feed_forward")]
    assert len(products) == 2


@pytest.mark.compiles("comm", "tp2 sequence")
def test_selected_communication_is_repeated(compiled):
    """The gather behind a norm: instead of the gathered tokens their slices are kept."""
    assert counts(compiled("tp2 sequence"), 0, ["AllGather"]) == {"AllGather": 2}
    assert counts(compiled("comm"), 0, ["AllGather", "RmsNorm"]) == {"AllGather": 4, "RmsNorm": 4}
    assert counts(compiled("comm"), 1, ["AllGather", "RmsNorm"]) == {"AllGather": 2, "RmsNorm": 2}


@pytest.mark.compiles("kept slices")
def test_kept_outputs_can_be_slices(compiled):
    """What layer 0 hands to layer 1 is kept as a slice and gathered before it is recomputed from."""
    graph = compiled("kept slices")
    gathers = [node for node in graph.find("AllGather") if not node.backward]
    assert [node.shapes for node in gathers] == [((64, 64),)]


@pytest.mark.compiles("one device")
def test_one_device_recomputes_and_exchanges_nothing(compiled):
    graph = compiled("one device")
    assert graph.collectives() == []
    assert counts(graph, 0)["FlashAttentionScore"] == 2
    assert counts(graph, 1)["FlashAttentionScore"] == 1
