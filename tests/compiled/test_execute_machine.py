"""One rank by itself: what it cannot compute or exchange is named with rank and place, never a traceback."""

from __future__ import annotations

import numpy as np
import pytest

from mindllm.compiled.execute.exchange import NoExchange
from mindllm.compiled.execute.kernels import NoKernel
from mindllm.compiled.execute.lockstep import Lockstep
from mindllm.compiled.execute.rank_interpreter import RankInterpreter, ShapeMismatch
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Function, Input, Node, TensorType
from mindllm.compiled.graph.compiled_graph import Parameter as Held

X = np.arange(6, dtype=np.float32).reshape(2, 3)
FLOATS = TensorType((2, 3), "float32")


def run(op: str, /, rank: int = 5, shape: TensorType = FLOATS, **attributes) -> np.ndarray:
    """What a rank returns whose graph is one operator on ``X``."""
    node = Node(op, "result", ("x",), shape, f"Default/network-Loss/{op}-op0", attributes)
    function = Function("step", (node,), (Input("x", FLOATS),), "result")
    machine = RankInterpreter(CompiledGraph(rank, (function,), {}, {}, {}, b""), {})
    return Lockstep([machine], {rank: [X]}).run()[rank]


def test_an_operator_is_computed_and_an_exchange_carried_out():
    assert np.array_equal(run("Square"), X * X)
    assert np.array_equal(run("AllReduce", group_rank_ids=(5,), op="sum"), X)


@pytest.mark.parametrize("op", ["Nonsense", "WeightQuantBatchMatmul"])
def test_an_operator_nobody_has_a_kernel_for_is_named_with_rank_and_place(op):
    place = f"rank 5: {op} at Default/network-Loss/{op}-op0 cannot be computed here: no kernel of the CPU does"
    with pytest.raises(NoKernel, match=place) as error:
        run(op)
    assert error.value.exit_code == 1


def test_a_change_of_a_parameter_that_nobody_knows_is_named_and_not_taken_for_a_value():
    """A kernel would change a copy of the parameter, and the step would train nothing in silence."""
    node = Node("Square", "result", ("w",), FLOATS, "Default/optimizer/Square-op0", {"side_effect_mem": True})
    graph = CompiledGraph(
        5, (Function("step", (node,), (), "result"),), {"w": Held("w", "w", (2, 3), "float32")}, {}, {}, b""
    )
    machine = RankInterpreter(graph, {"w": X})
    with pytest.raises(NoKernel, match=r"rank 5: Square at .* nothing here knows how it changes w"):
        Lockstep([machine], {5: []}).run()


def test_an_update_without_its_operands_is_named_with_rank_and_place():
    with pytest.raises(NoKernel, match="rank 5: SGD at Default/network-Loss/SGD-op0 cannot be computed here"):
        run("SGD")


def test_operands_a_kernel_does_not_take_are_named_with_rank_and_place():
    with pytest.raises(NoKernel, match="rank 5: MatMul at Default/network-Loss/MatMul-op0 cannot be computed here"):
        run("MatMul")


def test_an_unknown_collective_is_named_with_rank_group_and_place():
    place = (
        "rank 5: AlltoAllVC over ranks 5 at Default/network-Loss/AlltoAllVC-op0 cannot be carried out here: known are"
    )
    with pytest.raises(NoExchange, match=place) as error:
        run("AlltoAllVC", group_rank_ids=(5,), group="g")
    assert error.value.exit_code == 1


def test_an_unknown_reduction_is_named():
    with pytest.raises(NoExchange, match="it reduces by mean, known are sum, max, min, prod"):
        run("AllReduce", group_rank_ids=(5,), op="mean")


def test_a_result_of_another_shape_than_the_compiler_derived_is_named():
    with pytest.raises(ShapeMismatch, match=r"rank 5: Square at .* yields \[2, 3\], the compiler derived \[3\]"):
        run("Square", shape=TensorType((3,), "float32"))
