"""Layers of each chunk and stage: exactly all of them are placed, or it is an error."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.architecture.layer_counts import layer_counts


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks", "offset", "expected"),
    [
        (32, 4, 1, 0, ((8, 8, 8, 8),)),
        (5, 1, 1, 0, ((5,),)),
        (48, 5, 2, [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]], ((4, 5, 5, 5, 5), (5, 5, 5, 5, 4))),  # MindFormers' example
        (62, 16, 1, [1] * 15 + [-1], ((4,) * 15 + (2,),)),  # 61 layers and a multi-token-prediction layer
        (64, 4, 1, [-1, -1, 1, 1], ((15, 15, 17, 17),)),
        (50, 4, 2, [[1, 1, 0, 0], [0, 0, 0, 0]], ((7, 7, 6, 6), (6, 6, 6, 6))),
        (52, 4, 2, [1, 1, 0, 0], ((7, 7, 6, 6), (7, 7, 6, 6))),
    ],
)
def test_examples(num_layers, stages, chunks, offset, expected):
    assert layer_counts(num_layers, stages, chunks, offset) == expected


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks", "offset", "message"),
    [
        (50, 4, 2, [1, 1, 0, 0], "sums to 4 over 2 chunk"),  # accepted by MindFormers, with 52 places for 50 layers
        (33, 4, 1, 1, "sums to 4"),  # accepted by MindFormers, with 36 places for 33 layers
        (33, 4, 1, 0, r"leave 1 to place beyond 8 each; write for example \[0, 0, 0, 1\]"),
        (50, 4, 2, 0, r"for example \[\[0, 0, 0, 0\], \[0, 0, 1, 1\]\]"),
        (32, 4, 1, [0, 0, 0], "needs 4 numbers, one for each stage"),
        (32, 4, 2, [[0, 0, 0, 0]], "needs 2 list"),
        (32, 4, 2, [[0, 0, 0, 0], [0, 0, 0]], "needs 4 numbers"),
        (32, 4, 1, [0, [0], 0, 0], "needs 1 list"),
        (8, 4, 1, [-2, 1, 1, 0], "gives stage 0 of chunk 0 0 layers"),
        (8, 4, 1, [1, -3, 1, 1], "gives stage 1 of chunk 0 -1 layers"),
        (3, 4, 1, [1, 1, 1, 0], "gives stage 3 of chunk 0 0 layers"),
    ],
)
def test_plans_that_do_not_fit(num_layers, stages, chunks, offset, message):
    with pytest.raises(ValueError, match=message):
        layer_counts(num_layers, stages, chunks, offset)


@given(
    st.integers(1, 5).flatmap(
        lambda stages: st.lists(st.lists(st.integers(1, 9), min_size=stages, max_size=stages), min_size=1, max_size=4)
    )
)
def test_every_placement_has_an_offset_that_gives_it(counts):
    chunks, stages = len(counts), len(counts[0])
    num_layers = sum(map(sum, counts))
    average = num_layers // (chunks * stages)
    offset = [[count - average for count in row] for row in counts]
    assert layer_counts(num_layers, stages, chunks, offset) == tuple(map(tuple, counts))


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 4))
def test_the_offset_that_the_error_proposes_is_accepted(num_layers, stages, chunks):
    try:
        counts = layer_counts(num_layers, stages, chunks, 0)
    except ValueError as error:
        if num_layers < stages * chunks:
            return
        proposed = ast.literal_eval(str(error).rsplit("example ", 1)[1])
        counts = layer_counts(num_layers, stages, chunks, proposed)
    assert sum(map(sum, counts)) == num_layers or num_layers < stages * chunks
