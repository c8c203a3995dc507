"""Graphs of ranks share what they have in common, and are what they were."""

from __future__ import annotations

import numpy as np
import pytest

from mindllm.compiled.graph.mind_ir import parse_mind_ir
from mindllm.compiled.rank.pool import Pool


def test_equal_values_become_one_object_and_numbers_of_other_types_do_not():
    pool = Pool()
    one, other = ("a", "".join(["b", "c"])), ("a", "bc")
    assert pool.same(one) is pool.same(other)
    assert pool.plain((1, (2.0,))) is pool.plain((1, (2.0,)))
    assert [type(value) for value in pool.plain((True, 1))] == [bool, int]
    assert [type(value) for value in pool.plain((1, 1.0))] == [int, float]
    first = pool.array(np.ones((2, 3), np.float32))
    assert pool.array(np.ones((2, 3), np.float32)) is first
    assert pool.array(np.ones((3, 2), np.float32)).shape == (3, 2)
    assert pool.array(np.ones((2, 3), np.int32)).dtype == np.int32


def test_arrays_in_attributes_stay_themselves():
    pool, held = Pool(), np.zeros(4)
    assert pool.plain({"table": held})["table"] is held
    assert pool.attributes({"table": held})["table"] is held


@pytest.mark.compiles("tp2")
def test_graphs_of_one_pool_are_equal_to_graphs_alone(compiled):
    data, pool = compiled("tp2").mind_ir, Pool()
    alone = parse_mind_ir(data, 0)
    together = [parse_mind_ir(data, rank, pool=pool) for rank in (0, 1)]
    for graph in together:
        assert repr(graph.functions) == repr(alone.functions)
        assert (graph.parameters, graph.groups) == (alone.parameters, alone.groups)
        assert not graph.mind_ir
    for first, second in zip(*(graph.nodes() for graph in together), strict=True):
        assert first.scope is second.scope
        assert first.inputs is second.inputs
        assert first.primal is second.primal
