"""Plans in the forms of others, read back by their own readers: PyTorch's pipelining, and Megatron-LM's documented layout."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import random_problem

from mindllm.errors import UserError
from mindllm.planning.exports import megatron_layout, megatron_options, torch_schedule
from mindllm.planning.plan import Plan, evaluate, is_long
from mindllm.planning.problem import make_problem
from mindllm.planning.solve import solve

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def lone(schedule, stages, chunks, micro_batches, counts=None):
    """The evaluation of an even plan, or one with these layers on the places, of equal layers without recomputation."""
    counts = counts or [1] * (stages * chunks)
    layer = {
        "name": "layer",
        "count": sum(counts),
        "forward": 1.0,
        "weight_gradient": 1.0,
        "kinds": {"none": {"backward": 2.0, "activation_mb": 1.0}},
    }
    fields = {"stages": stages, "chunks": chunks, "micro_batches": micro_batches, "schedule": schedule}
    return evaluate(make_problem({**fields, "layers": [layer]}, "test"), Plan(tuple(("none",) * n for n in counts)))


def read_by_torch(evaluation, path):
    """What PyTorch reads of the file, by rank; it has added the sends and receives and found that no rank waits for ever."""
    path.write_text(torch_schedule(evaluation))
    problem = evaluation.problem
    runtime = schedules.PipelineScheduleMulti.__new__(schedules.PipelineScheduleMulti)
    runtime.pipeline_order, runtime.pp_group_size = {}, problem.stages
    runtime._num_stages, runtime._n_microbatches, runtime._stages = problem.places, problem.micro_batches, []
    runtime._load_csv(path)
    actions = {rank: [*row] for rank, row in runtime.pipeline_order.items()}
    mapping = runtime.stage_index_to_group_rank
    sent = schedules._add_send_recv(runtime.pipeline_order, mapping.__getitem__, problem.places)
    schedules._simulate_comms_compute(sent, mapping.__getitem__, problem.places)
    return actions


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(["1f1b", "less_memory", "gpipe"]),
    stages=st.integers(1, 4),
    chunks=st.integers(1, 3),
    micro_batches=st.integers(1, 9),
)
def test_pytorch_reads_every_pass_once_and_in_an_order_that_ends(
    tmp_path_factory, schedule, stages, chunks, micro_batches
):
    actions = read_by_torch(
        lone(schedule, stages, chunks, max(micro_batches, stages)), tmp_path_factory.mktemp("csv") / "order.csv"
    )
    found = sorted(str(action) for row in actions.values() for action in row)
    every = range(max(micro_batches, stages))
    assert found == sorted(f"{place}{what}{n}" for place in range(stages * chunks) for what in "FB" for n in every)


@pytest.mark.parametrize("stages", [2, 4])
def test_pytorch_reads_a_v_whose_second_chunk_runs_back(tmp_path, stages):
    """MindSpore's order of a V: PyTorch finds the ranks of its stages, and that no rank waits for ever."""
    actions = read_by_torch(lone("zero_bubble_v", stages, 2, 2 * stages + 1), tmp_path / "order.csv")
    for rank, row in actions.items():
        assert {action.stage_index for action in row} == {rank, 2 * stages - 1 - rank}
        assert sum("F" in str(action) for action in row) == 2 * (2 * stages + 1)


def test_megatron_has_no_v():
    with pytest.raises(UserError, match="no V"):
        megatron_options(lone("zero_bubble_v", 2, 2, 4))


@pytest.mark.parametrize("micro_batches", [4, 8, 12])
def test_our_interleaved_1f1b_is_pytorch_s(tmp_path, micro_batches):
    theirs = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs._n_microbatches, theirs.n_local_stages = 4, micro_batches, 2
    theirs.number_of_rounds = max(1, micro_batches // 4)
    theirs.microbatches_per_round = micro_batches // theirs.number_of_rounds
    for rank, ours in read_by_torch(lone("1f1b", 4, 2, micro_batches), tmp_path / "order.csv").items():
        order = [action for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        assert ours == [action for action in order if action.is_compute_op]


def test_of_a_long_pipeline_all_micro_batches_stand_in_the_file():
    evaluation = lone("1f1b", 5, 1, 60_000)
    assert is_long(evaluation.problem)
    rows = torch_schedule(evaluation).splitlines()
    assert [row.count("F") for row in rows] == [60_000] * 5


def expanded(layout):
    """Letters of each place, by the rules that Megatron Core documents."""
    while "(" in layout:
        layout = re.sub(r"\(([^()]*)\)(?:\*(\d+))?", lambda found: found[1] * int(found[2] or 1), layout)
    layout = re.sub(r"([Etml L])\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    return layout.replace(",", "").split("|")


def test_the_reader_of_layouts_reads_megatron_s_own_example():
    places = expanded("Et*3|(tt|)*29,m|L")
    assert len(places) == 32
    assert places[:2] + places[-2:] == ["Ettt", "tt", "m", "L"]
    assert sum(place.count("t") for place in places) == 61


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=16).filter(any), ahead=st.integers(0, 2))
def test_a_layout_says_the_layers_of_every_place(counts, ahead):
    held = [*counts[:-1], counts[-1] + ahead]  # a layer that predicts ahead is one of the last place
    evaluation = type("Evaluation", (), {"plan": Plan(tuple(("none",) * count for count in held))})
    places = expanded(megatron_layout(evaluation, ahead))
    assert [place.count("t") for place in places] == counts
    assert "".join(places) == "E" + "t" * sum(counts) + "m" * ahead + "L"


def test_a_plan_of_a_problem_has_the_layers_of_its_plan():
    best = solve(random_problem(3, stages=3, layers=9, kinds=2, micro_batches=4), 10).best
    assert [place.count("t") for place in expanded(megatron_layout(best))] == list(best.plan.counts)
