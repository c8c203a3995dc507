"""Which run is asked for where simulated ones do not tell costs apart: it is enough."""

import itertools

import pytest

from mindllm.planning.from_programs.stage_shapes import StageShape, place_of, too_few, undetermined

DENSE, EXPERTS = ("dense", "full"), ("experts", "full")


def run(*stages):
    return [StageShape(place_of(number, len(stages)), tuple(layers)) for number, layers in enumerate(stages)]


EVEN = run([DENSE, EXPERTS], [EXPERTS, EXPERTS])
MOVED = run([DENSE], [EXPERTS, EXPERTS, EXPERTS])
WITHOUT_DENSE = run([EXPERTS, EXPERTS], [EXPERTS])


def test_experts_behind_a_dense_layer_are_told_apart_by_a_run_without_it():
    said = str(too_few([EVEN, MOVED], "runs"))
    assert said.startswith("runs: 4 simulated stages do not tell the costs of dense, first, ")
    assert said.endswith("add a run with 0 of dense, 3 of experts, offset: [1, 0], recompute: [2, 1]")
    assert too_few([EVEN, MOVED, WITHOUT_DENSE], "runs") is None


def test_two_runs_are_asked_for_where_one_is_not_enough():
    said = str(too_few([EVEN], "runs"))
    assert "; and one with " in said
    assert "recompute: [1, 3]; and one with 0 of dense, 3 of experts, offset: [1, 0]" in said


def test_where_nothing_known_helps_another_number_of_layers_is_asked_for():
    four = ("other", "full"), ("more", "full"), EXPERTS, DENSE
    assert str(too_few([run(four, four)], "runs")).endswith("add a run with another number of layers of each type")


@pytest.mark.parametrize("kinds", list(itertools.product(("none", "full"), repeat=2)))
def test_any_two_runs_of_one_type_are_completed(kinds):
    first, second = (("layer", kind) for kind in kinds)
    runs = [run([first, first], [first, first]), run([second], [second, second, second])]
    assert (too_few(runs, "runs") is None) == (not undetermined([stage for one in runs for stage in one]))
