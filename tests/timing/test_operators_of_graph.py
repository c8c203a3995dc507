"""Operators of a compiled graph take what the model of time says."""

import pytest

from mindllm.compiled.graph.compiled_graph import CompiledGraph, Function, Node, Parameter, TensorType
from mindllm.timing.costs.exchanges import Group, exchange_seconds
from mindllm.timing.costs.of_graph import operator_time
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import product
from mindllm.timing.device import DEFAULT, read_device

DEVICE = read_device(DEFAULT)
DIMENSIONS = {"a": (64, 128), "b": (128, 256), "c": (64, 256)}


def graph_of(op, inputs, ranks=(), shape=(64, 256)):
    """A graph of one operator on half-precision tensors."""
    parameters = {name: Parameter(name, name, DIMENSIONS[name], "float16") for name in inputs}
    node = Node(op, "out", tuple(inputs), TensorType(shape, "float16"), "", {"group_rank_ids": ranks})
    return CompiledGraph(0, (Function("step", (node,), (), "out"),), parameters, {}), node


def test_an_operator_of_a_graph_takes_what_the_model_of_time_says():
    """One product, as the planner reads it from a compiled graph and as the step's model writes it down."""
    described = product("", 64, 128, 256, "float16")
    assert operator_time(*graph_of("MatMul", "ab"), DEVICE) == pytest.approx(1e3 * operator_seconds(described, DEVICE))


@pytest.mark.parametrize(
    ("op", "ranks", "group"),
    [("AllGather", (0, 1, 2, 3), Group(4)), ("AllReduce", (0, 8), Group(2, 8)), ("Send", (0, 8), Group(2, 8))],
)
def test_an_exchange_of_a_graph_takes_what_the_model_of_time_says(op, ranks, group):
    spent = operator_time(*graph_of(op, "c", ranks), DEVICE)
    assert spent == pytest.approx(1e3 * exchange_seconds(op, 2 * 64 * 256, group, DEVICE))
