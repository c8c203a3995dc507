"""Layouts of parameters: whatever axes of the grid a dimension is cut along, the parts of all ranks make the whole."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.parallel.parameter_layout import ParameterLayout

OF_TWO_AXES = [[2, 2, 2], [1, 2, -1], [196, 512], 0, True, "", [784, 512], [1, 196, 512], False, False, 0, 0]
"""What MindSpore 2.10 answers of a weight ``[784, 512]`` with the strategy ``(("outer", "inner"), "None")`` of a ``Layout``."""


@st.composite
def layouts(draw):
    """A layout, and the same as MindSpore answers it: a dimension that is cut along several axes is several dimensions."""
    grid = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    waiting = draw(st.permutations(range(len(grid))))
    axes, expanded, parts, whole = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        own, waiting = waiting[: (count := draw(st.integers(0, len(waiting))))], waiting[count:]
        left = draw(st.integers(1, 4))
        axes.append(tuple(own))
        whole.append(left * math.prod(grid[-1 - axis] for axis in own))
        expanded += own or [-1]
        parts += [1] * (len(own) - 1) + [left]
    kept = [size // math.prod(grid[-1 - axis] for axis in own) for size, own in zip(whole, axes, strict=True)]
    return axes, [grid, expanded, kept, 0, True, "", whole, parts, False, False, 0, 0]


@given(layouts())
def test_parts_of_all_ranks_make_the_whole(given_layout):
    axes, answered = given_layout
    grid, whole = answered[0], np.arange(math.prod(answered[6])).reshape(answered[6])
    layout = ParameterLayout(tuple(grid), tuple(axes), tuple(answered[6]), tuple(answered[2]))
    seen = [whole[layout.slices(rank)] for rank in range(math.prod(grid))]
    assert {part.shape for part in seen} == {layout.slice_shape}
    copies = math.prod(grid) * math.prod(layout.slice_shape) // whole.size
    assert np.array_equal(np.sort(np.concatenate([part.ravel() for part in seen])), np.repeat(whole.ravel(), copies))
    assert [layout.copies_before(rank) < copies for rank in range(math.prod(grid))] == [True] * math.prod(grid)


def test_a_dimension_along_two_axes_is_read_as_one():
    layout = ParameterLayout.from_front_end(OF_TWO_AXES)
    layout.require_consistent()
    assert layout.axes == ((1, 2), ())
    assert [layout.slices(rank)[0].start for rank in range(8)] == [0, 0, 392, 392, 196, 196, 588, 588]
    assert ParameterLayout.from_json({**vars(layout), "tensor_map": [[1, 2], [-1]]}) == layout


@given(layouts())
def test_what_mindspore_answers_is_read(given_layout):
    axes, answered = given_layout
    layout = ParameterLayout.from_front_end(answered)
    layout.require_consistent()
    mine = ParameterLayout(layout.device_matrix, tuple(axes), layout.full_shape, layout.slice_shape)
    for rank in range(math.prod(layout.device_matrix)):
        assert layout.slices(rank) == mine.slices(rank)


@pytest.mark.parametrize(
    ("place", "wrong", "said"),
    [
        (7, [3, 196, 512], "do not make up"),
        (1, [1, 7, -1], "not axes of the devices"),
        (1, ["1", 2, -1], "not axes of the devices"),
    ],
)
def test_dimensions_that_make_up_no_other_are_refused(place, wrong, said):
    with pytest.raises(ValueError, match=said):
        ParameterLayout.from_front_end([*OF_TWO_AXES[:place], wrong, *OF_TWO_AXES[place + 1 :]])
