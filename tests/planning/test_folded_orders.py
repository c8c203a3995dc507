"""Orders of a V within a memory limit: what they hold and take, bounds, every order of a small one, and PyTorch's reader."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindllm.deadline import now
from mindllm.planning.exports import csv_of_orders
from mindllm.planning.zero_bubble import folded_orders as folded
from mindllm.planning.zero_bubble.filled_waits import filled
from mindllm.planning.zero_bubble.folded_bound import folded_bound
from mindllm.planning.zero_bubble.folded_costs import FoldedCosts
from mindllm.planning.zero_bubble.folded_orders import folded_orders, orders_of_kinds
from mindllm.planning.zero_bubble.operation_order import fits, walk
from mindllm.planning.zero_bubble.repeated_blocks import Grid, ranked, stable_blocks
from mindllm.schedules.orders import alive, timetable
from mindllm.schedules.simulate import simulate_times


def random_costs(seed, stages, micro_batches, delay=0.0):
    random = np.random.default_rng(seed)
    times = random.uniform(0.5, 2, (3, 2, stages))
    held = random.uniform(0.5, 1.5, (2, stages))
    limit = held.sum(axis=0) * random.uniform(1, micro_batches + 0.2, stages)
    return FoldedCosts(*times, held, limit, delay)


def equal_costs(stages, limit, times=(1.0, 1.0, 1.0), delay=0.0):
    one = np.ones((2, stages))
    return FoldedCosts(*(time * one for time in times), one, np.full(stages, float(limit)), delay)


def step(costs, orders):
    return simulate_times(timetable(orders, 2), costs.times, costs.delay).makespan


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), stages=st.integers(1, 3), micro=st.integers(1, 4), delay=st.sampled_from((0.0, 0.3)))
def test_an_order_keeps_within_memory_and_is_no_shorter_than_the_bound(seed, stages, micro, delay):
    costs = random_costs(seed, stages, micro, delay)
    orders = folded_orders(costs, micro, effort=2_000)
    every = sorted((what, chunk, number) for what in (0, 2, 3) for chunk in (0, 1) for number in range(micro))
    assert all(sorted(order) == every for order in orders)
    for stage, vectors in enumerate(alive(orders, 2)):
        assert (vectors @ costs.held[:, stage]).max() <= costs.limit[stage] * (1 + 1e-9)
    assert folded_bound(costs, micro) <= step(costs, orders) * (1 + 1e-9)


def test_the_walk_times_what_the_simulator_does():
    costs = random_costs(5, 3, 4, 0.2)
    kinds = folded.one_by_one(3, 4)
    assert max(walk(costs, kinds).ends) == pytest.approx(step(costs, orders_of_kinds(kinds)))


def every_order():
    """Of one micro-batch on a stage, as far as the stage itself has to keep to one."""
    for order in itertools.permutations(range(6)):
        place = {kind: number for number, kind in enumerate(order)}
        in_turn = place[folded.F0] < place[folded.F1] < place[folded.B1] < place[folded.B0] < place[folded.W0]
        if in_turn and place[folded.B1] < place[folded.W1]:
            yield list(order)


@pytest.mark.parametrize("seed", range(8))
def test_of_one_micro_batch_it_is_the_best_of_all_orders(seed):
    costs = random_costs(seed, 2, 1, 0.1)
    options = [[order for order in every_order() if fits(costs, stage, order)] for stage in range(2)]
    best = min(max(walk(costs, kinds).ends) for kinds in itertools.product(*options))
    assert step(costs, folded_orders(costs, 1, effort=2_000)) == pytest.approx(best)
    assert folded_bound(costs, 1) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("stages", "limit", "bubble"), [(4, 4, 11), (4, 5, 8), (4, 6, 5), (4, 8, 3), (8, 8, 23), (8, 9, 20), (8, 12, 11)]
)
def test_equal_passes_wait_no_longer_than_in_the_published_schedules(stages, limit, bubble):
    """As the schedulers of Qi et al. give them, V-min of 8 stages shorter: what a step is longer than its work, in passes."""
    costs, micro = equal_costs(stages, limit), 2 * stages
    orders = folded_orders(costs, micro, effort=1_000_000)
    assert max(int(held.sum(axis=1).max()) for held in alive(orders, 2)) <= limit
    assert folded_bound(costs, micro) <= step(costs, orders) <= 6 * micro + bubble + 1e-9


@pytest.mark.parametrize("grid", [Grid(1, 1, 1), Grid(2, 2, 1)])
def test_blocks_clash_nowhere_and_are_timed_as_the_simulator_does(grid):
    """Repeated for ever they keep every slot of a period for one pass; of some micro-batches they keep within memory."""
    costs = random_costs(1, 4, 9, 0.3)
    costs = replace(costs, limit=4 * costs.held.sum(axis=0))
    blocks = stable_blocks(costs, 9, grid)
    assert len(blocks) > 3
    for block in blocks:
        for starts in block.T:
            slots = [start + more for start, long in zip(starts, grid.slots, strict=True) for more in range(long)]
            assert sorted(slot % grid.period for slot in slots) == list(range(grid.period))
    orders = list(ranked(costs, 9, grid))
    times = [step(costs, orders_of_kinds(kinds)) for kinds in orders]
    assert len(times) == len(blocks)
    assert times == sorted(times)
    assert all(folded.keeps_within(costs, kinds) for kinds in orders)


@pytest.mark.parametrize("seed", range(6))
def test_filling_waits_shortens_an_order_within_memory(seed):
    """An order of single micro-batches is all waits; time turned round takes no more memory than time as it is."""
    costs = random_costs(seed, 4, 6, 0.2)
    plain = folded.one_by_one(4, 6)
    kinds, effort = filled(costs, plain)
    assert folded.keeps_within(costs, kinds)
    assert effort > 0
    assert step(costs, orders_of_kinds(kinds)) < 0.9 * step(costs, orders_of_kinds(plain))


def test_a_deadline_ends_the_search_with_an_order():
    costs = random_costs(3, 6, 12, 0.2)
    start = now()
    orders = folded_orders(costs, 12, deadline=start + 0.3)
    assert now() - start < 3
    assert all(len(order) == 72 for order in orders)


def test_pytorch_reads_it_back(tmp_path):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    orders = folded_orders(equal_costs(4, 6), 8, effort=2_000)
    path = tmp_path / "order.csv"
    path.write_text(csv_of_orders(orders, (0, 1, 2, 3, 7, 6, 5, 4)))
    runtime = schedules.PipelineScheduleMulti.__new__(schedules.PipelineScheduleMulti)
    runtime.pipeline_order, runtime.pp_group_size = {}, 4
    runtime._num_stages, runtime._n_microbatches, runtime._stages = 8, 8, []
    runtime._load_csv(path)
    mapping = runtime.stage_index_to_group_rank
    assert mapping == schedules.generate_stage_to_rank_mapping(4, 8, style="v")
    sent = schedules._add_send_recv(runtime.pipeline_order, mapping.__getitem__, 8)
    schedules._simulate_comms_compute(sent, mapping.__getitem__, 8)
    for row in runtime.pipeline_order.values():
        assert sorted(str(action)[1:2] for action in row) == sorted("FIW" * 16)
