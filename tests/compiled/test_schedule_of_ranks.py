"""The simulator's order of passes is the one that MindSpore's compiler prescribes, read off its graphs."""

import pytest
from small_cluster import cluster_run

from mindllm.compiled.graph.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, micro_batch_schedule
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.schedules import operations
from mindllm.schedules.orders import stage_orders

KINDS = {
    FORWARD: operations.FORWARD,
    BACKWARD: operations.BACKWARD,
    INPUT: operations.INPUT,
    WEIGHT: operations.WEIGHT,
}


def passes(graph):
    """What a rank computes in the order of its graph."""
    events = (event for event in micro_batch_schedule(graph) if event.peer is None)
    return tuple((KINDS[event.kind], event.chunk, event.micro_batch) for event in events)


@pytest.mark.compiles("pp2 first", "pp2 last", "interleaved first", "v first", "v last")
@pytest.mark.parametrize(
    ("case", "schedule", "stage", "chunks", "micro"),
    [
        ("pp2 first", "1f1b", 0, 1, 4),
        ("pp2 last", "1f1b", 1, 1, 4),
        ("interleaved first", "1f1b", 0, 2, 4),
        ("v first", "zero_bubble_v", 0, 2, 5),
        ("v last", "zero_bubble_v", 1, 2, 5),
    ],
)
def test_ranks_compute_in_the_order_of_the_simulator(compiled, case, schedule, stage, chunks, micro):
    assert passes(compiled(case)) == stage_orders(schedule, 2, chunks, micro)[stage]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "micro", "pieces"),
    [("seqpipe", 2, 2, 5, 1), ("seqsmartvpp", 4, 2, 6, 1), ("seqpipe", 2, 1, 2, 4), ("seqvpp", 2, 2, 3, 2)],
)
def test_sequences_go_whole_or_in_pieces_in_the_order_of_the_simulator(schedule, stages, chunks, micro, pieces):
    model = {"num_layers": stages * chunks, "pp_interleave_num": chunks}
    scheduler = {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": schedule}}
    config = cluster_run(pp=stages, micro=micro, model=model, parallel=scheduler, seq_split_num=pieces)
    orders = stage_orders(schedule, stages, chunks, micro, pieces)
    for stage in range(stages):
        assert passes(compile_rank(config, stage)) == orders[stage]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "chunks", "micro"), [(2, 2, 5), (4, 2, 6), (2, 3, 5), (2, 3, 8)])
def test_micro_batches_that_stages_do_not_divide_go_in_the_order_of_the_simulator(stages, chunks, micro):
    model = {"num_layers": stages * chunks, "pp_interleave_num": chunks}
    interleaved = {"pipeline_config": {"pipeline_interleave": True}}
    config = cluster_run(pp=stages, micro=micro, model=model, parallel=interleaved)
    orders = stage_orders("1f1b", stages, chunks, micro)
    for stage in range(stages):
        assert passes(compile_rank(config, stage)) == orders[stage]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "micro"), [(4, 8), (4, 10), (8, 17)])
def test_longer_pipelines_in_a_v_compute_in_the_order_of_the_simulator(stages, micro):
    model = {"num_layers": 2 * stages, "pp_interleave_num": 2}
    scheduler = {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}}
    config = cluster_run(pp=stages, micro=micro, model=model, parallel=scheduler)
    orders = stage_orders("zero_bubble_v", stages, 2, micro)
    for stage in range(stages):
        assert passes(compile_rank(config, stage)) == orders[stage]
