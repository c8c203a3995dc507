"""The plan per layer: MindFormers' meaning of the lists, their log lines, and that a rendered plan reads back the same."""

import random
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from small_cluster import cluster_run

from mindllm.architecture.layer_counts import places_in_order
from mindllm.config import override_config
from mindllm.errors import UserError
from mindllm.parallel import LayerAssignment, LayerPlan, make_plan, plan_lines, render_plan

SILU, MUL, GATE, UP = (
    rf"feed_forward\.{name}" for name in (r"w1\.activation\.silu", "mul", r"w1\.matmul", r"w3\.matmul")
)
INTERLEAVED = {"pipeline_config": {"pipeline_interleave": True}}


def planned(layers, stages=1, chunks=1, offset=0, micro=None, **recompute):
    model = {"num_layers": layers, "offset": offset, "pp_interleave_num": chunks}
    context = INTERLEAVED if chunks > 1 else {}
    return cluster_run(
        dp=8, pp=stages, micro=micro or stages, model=model, parallel=context, recompute_config=recompute
    )


def full(plan):
    return [number for number, layer in enumerate(plan.layers) if layer.recompute]


def with_pattern(plan, key, pattern):
    return [number for number, layer in enumerate(plan.layers) if pattern in layer.applied(key)]


def test_mindformers_documented_example():
    config = planned(
        48,
        stages=5,
        chunks=2,
        offset=[[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        recompute=[[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        select_recompute={SILU: True, MUL: True, GATE: [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]], UP: [2, 1, 0, 0, 0]},
        select_comm_recompute=[r"ffn_norm\.norm", r"attention_norm\.norm"],
    )
    plan = make_plan(config)
    lines = plan_lines(plan)
    assert "num_layers per stage: [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]" in lines
    assert "Accumulated num_layers per stage: [[4, 9, 14, 19, 24], [29, 34, 39, 44, 48]]" in lines
    assert "Formative layer_recompute: [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]" in lines
    assert full(plan) == [0, 1, 4, 24]
    assert with_pattern(plan, "select_recompute", MUL) == [n for n in range(48) if n not in (0, 1, 4, 24)]
    assert with_pattern(plan, "select_recompute", GATE) == [25, 29]  # 0 and 24 are recomputed fully
    assert with_pattern(plan, "select_comm_recompute", r"ffn_norm\.norm") == [
        n for n in range(48) if n not in (0, 1, 4, 24)
    ]


def test_a_count_for_a_stage_goes_round_robin_over_its_chunks():
    """MindFormers prints [2, 1, 0, 0, 0] over two chunks as [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]."""
    offset = [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    plan = make_plan(planned(48, stages=5, chunks=2, offset=offset, select_recompute={UP: [2, 1, 0, 0, 0]}))
    line = next(line for line in plan_lines(plan) if line.startswith("Formative select_recompute:"))
    assert line.endswith("[[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]}")


def test_round_robin_passes_full_chunks():
    plan = make_plan(planned(6, stages=2, chunks=2, offset=[[0, 0], [1, 1]], recompute=[3, 2]))
    assert [layer.chunk for layer in plan.layers] == [0, 0, 1, 1, 1, 1]
    assert full(plan) == [0, 1, 2, 3, 4]


def test_true_means_every_layer_of_the_place():
    assert full(make_plan(planned(8, stages=2, recompute=[True, 1]))) == [0, 1, 2, 3, 4]
    assert full(make_plan(planned(4, recompute=True))) == [0, 1, 2, 3]


def test_select_and_communication_counts_are_independent():
    plan = make_plan(planned(4, select_recompute=[2], select_comm_recompute=[1]))
    assert with_pattern(plan, "select_recompute", MUL) == [0, 1]
    assert with_pattern(plan, "select_comm_recompute", r".*\.norm") == [0]


def test_full_recomputation_wins_and_excludes_stay():
    plan = make_plan(planned(4, recompute=[2], select_recompute=[3], select_recompute_exclude={GATE: [1]}))
    assert with_pattern(plan, "select_recompute", MUL) == [2]
    assert with_pattern(plan, "select_recompute_exclude", GATE) == [0]


def test_pipeline_and_interleave_ids():
    lines = plan_lines(make_plan(planned(7, stages=2, chunks=2, offset=[[1, 1], [1, 0]])))
    assert "Pipeline id list with start_stage: [0, 0, 1, 1, 0, 0, 1]" in lines
    assert "Interleave id list: [0, 0, 0, 0, 1, 1, 1]" in lines


def test_exclude_counts_without_patterns_are_an_error():
    with pytest.raises(UserError, match=r"recompute_config\.select_recompute_exclude.* no patterns"):
        make_plan(planned(4, select_recompute_exclude=[2]))


def test_a_pattern_both_selected_and_excluded_is_an_error():
    config = planned(4, select_recompute={MUL: True}, select_recompute_exclude=[MUL])
    with pytest.raises(UserError, match=r"also in recompute_config\.select_recompute"):
        make_plan(config)


@pytest.mark.parametrize("key", ["recompute", "select_recompute", "select_comm_recompute"])
@pytest.mark.parametrize("value", [[1], [1, 1, 1], [5, 0], [[1, 1], [1, 1]]])
def test_lists_that_mindformers_takes_silently_are_refused_on_loading(key, value):
    with pytest.raises(UserError, match=f"recompute_config.{key}"):
        planned(8, stages=2, **{key: value})


@st.composite
def plans(draw):
    """Any plan that lists can express."""
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    chunks = chunks if stages > 1 else 1
    v_shape = chunks == 2 and draw(st.booleans())
    held = draw(st.lists(st.integers(1, 4), min_size=stages * chunks, max_size=stages * chunks))
    chance = random.Random(draw(st.integers(0, 2**16)))
    select = draw(st.permutations([SILU, MUL, GATE]))[: draw(st.integers(0, 3))]
    comm = draw(st.sampled_from([(), (r".*\.norm",)]))
    excluded = draw(st.sampled_from([(), (UP,)]))
    layers = []
    for (chunk, stage), count in zip(places_in_order(stages, chunks, v_shape), held, strict=True):
        whole = chance.randint(0, count)
        reach = {pattern: chance.randint(0, count) for pattern in (*select, *comm, *excluded)}
        for index in range(count):
            layers.append(_layer(chunk, stage, index, whole, reach, (select, comm, excluded)))
    return LayerPlan(stages, chunks, tuple(layers), v_shape)


def _layer(chunk, stage, index, whole, reach, patterns):
    select, comm, excluded = ([p for p in names if index < reach[p]] for names in patterns)
    found = {"select_recompute_exclude": excluded}
    if index >= whole:
        found |= {"select_recompute": select, "select_comm_recompute": comm}
    found = {key: tuple(names) for key, names in found.items() if names}
    return LayerAssignment(stage, chunk, index < whole, found)


@settings(max_examples=60)
@given(plans())
def test_a_rendered_plan_reads_back_the_same(plan):
    values = render_plan(plan)
    assert make_plan(with_values(plan, values)) == plan
    assert render_plan(make_plan(with_values(plan, values))) == values


@settings(max_examples=60)
@given(plans(), st.integers(0, 2**16))
def test_any_plan_reads_back_the_same_or_is_refused(plan, seed):
    chance = random.Random(seed)
    layers = list(plan.layers)
    number = chance.randrange(len(layers))
    layers[number] = replace(layers[number], recompute=chance.random() < 0.5, patterns={"select_recompute": (GATE, UP)})
    changed = replace(plan, layers=tuple(layers))
    try:
        values = render_plan(changed)
    except UserError:
        event("refused")
    else:
        event("rendered")
        assert make_plan(with_values(changed, values)) == changed


def with_values(plan, values):
    """A configuration with the rendered values of a plan."""
    pipeline = {
        "parallel.pipeline_config.pipeline_interleave": plan.chunks > 1,
        "parallel.pipeline_config.pipeline_scheduler": "zero_bubble_v" if plan.v_shape else "1f1b",
        "parallel_config.micro_batch_num": 2 * plan.stages if plan.stages > 1 else 1,
    }
    return override_config(planned(len(plan.layers)), {**values, **pipeline})


def test_a_v_counts_by_stage_and_walks_back():
    """As MindFormers' LayerSetting reads ``offset`` and lists under zero_bubble_v: by chunk and stage."""
    model = {"num_layers": 8, "pp_interleave_num": 2, "offset": [[0, -1], [-1, 2]]}
    context = {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}}
    recompute = {"recompute": [[1, 0], [0, 2]]}
    plan = make_plan(cluster_run(pp=2, micro=4, model=model, parallel=context, recompute_config=recompute))
    assert [(layer.chunk, layer.stage) for layer in plan.layers] == [(0, 0)] * 2 + [(0, 1)] + [(1, 1)] * 4 + [(1, 0)]
    assert full(plan) == [0, 3, 4]
    assert plan.last_stage == 0
    assert plan.layers_by_place == (range(0, 2), range(2, 3), range(7, 8), range(3, 7))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel_config.pipeline_stage": 1, "parallel_config.micro_batch_num": 1}, "zero_bubble_v needs a pipeline"),
        ({"parallel_config.micro_batch_num": 3}, "at least two micro batches per stage, 4"),
        ({"model.model_config.num_layers": 6, "model.model_config.pp_interleave_num": 3}, "write 2"),
        ({"micro_batch_interleave_num": 2, "runner_config.batch_size": 2}, "Unexpected empty queue"),
        ({"do_eval": True}, "crashes when it compiles an evaluation"),
    ],
)
def test_what_a_v_cannot_have_is_refused_on_loading(changes, says):
    model = {"num_layers": 4, "pp_interleave_num": 2}
    context = {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}}
    config = cluster_run(dp=2, pp=2, micro=4, model=model, parallel=context)
    with pytest.raises(UserError, match=says):
        override_config(config, changes)


def test_layers_that_are_not_the_first_cannot_be_rendered():
    layers = [LayerAssignment(stage=0, recompute=recompute) for recompute in (False, True)]
    with pytest.raises(UserError, match="no list can express that layer 0"):
        render_plan(LayerPlan(1, 1, tuple(layers)))


@pytest.mark.parametrize(
    ("stages", "chunks", "places"),
    [(2, 1, [(0, 1), (0, 0)]), (2, 1, [(0, 0), (0, 0)]), (2, 2, [(0, 0), (0, 1), (1, 0)])],
)
def test_a_plan_places_layers_in_order_and_everywhere(stages, chunks, places):
    layers = tuple(LayerAssignment(stage=stage, chunk=chunk) for chunk, stage in places)
    with pytest.raises(UserError, match="layer plan"):
        LayerPlan(stages, chunks, layers)
