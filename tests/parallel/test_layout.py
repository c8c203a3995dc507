"""Layouts by axis name: their integers, the ranks of every axis, and what integers cannot express."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.parallel.layout import Mesh

SIZES = st.integers(1, 4)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (("dp", None), (2, 1)),
        ((("dp", "tp"), None), (8, 1)),
        (("dp", "tp", None, None), (2, 4, 1, 1)),
        ((None, "tp"), (1, 4)),
        ((), ()),
    ],
)
def test_strategy_counts_slices(layout, expected):
    assert Mesh(data_parallel=2, model_parallel=4).strategy(layout) == expected


def test_experts_see_the_same_devices_in_the_same_order():
    mesh = Mesh(4, 2, expert_parallel=2)
    assert mesh.expert_axes == {"replica": 2, "ep": 2, "etp": 2}
    assert mesh.strategy(("replica", "ep", None, "etp")) == (2, 2, 1, 2)
    assert Mesh(4, 2, expert_parallel=8, expert_model_parallel=1).expert_axes == {"replica": 1, "ep": 8, "etp": 1}
    mesh.check([("replica", "ep", None, None), ("ep", "etp", None)])
    with pytest.raises(ValueError, match="copies along 'replica', outside of 'ep', cannot be written as integers"):
        mesh.check([("ep", None)])
    with pytest.raises(ValueError, match="unknown axis 'dp'"):
        mesh.check([("dp", "ep")])


@given(SIZES, SIZES, SIZES, SIZES)
def test_ranks_of_an_axis_differ_in_that_coordinate_alone(dp, cp, tp, pp):
    mesh = Mesh(dp, tp, pp, context_parallel=cp)
    coordinates = list(itertools.product(range(pp), range(dp), range(cp), range(tp)))  # of rank 0, 1, ...
    assert len(coordinates) == mesh.device_num
    for rank, place in enumerate(coordinates):
        assert mesh.stage_of(rank) == place[0]
        for position, axis in enumerate(("pp", "dp", "cp", "tp")):
            others = [
                r for r, other in enumerate(coordinates) if _without(other, position) == _without(place, position)
            ]
            assert mesh.ranks_along(axis, rank) == tuple(others)


def _without(place, position):
    return place[:position] + place[position + 1 :]


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ([("tp", "dp")], "in the order dp, cp, tp"),
        ([("dp", "dp")], "must be different"),
        ([("sp", None)], "unknown axis 'sp'"),
        ([(None, "tp")], "copies along 'dp', outside of 'tp'"),
    ],
)
def test_refuses_what_integers_would_place_elsewhere(layouts, message):
    with pytest.raises(ValueError, match=message):
        Mesh(2, 2).check(layouts)


def test_layouts_that_name_axes_have_them_in_any_order():
    mesh = Mesh(2, 2, context_parallel=4)
    with pytest.raises(ValueError, match="in the order dp, cp, tp"):
        mesh.check([("dp", "tp", "cp", None)])
    named = mesh.named(("dp", ("tp", "cp"), None)).to_dict()
    assert named["device_matrix"] == (2, 4, 2)
    assert named["tensor_map"] == (2, (0, 1), -1)
    Mesh(2, 2).check([("dp", "tp", "cp", None)])  # without such devices the axis is nowhere


def test_accepts_copies_inside_and_axes_of_size_one():
    Mesh(2, 2).check([("dp", None)])
    Mesh(2, 2).check([("dp", None), ("tp", None)])
    Mesh(data_parallel=1, model_parallel=2).check([(None, "tp")])
