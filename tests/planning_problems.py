"""Random planning problems, and a judge that shares nothing with the planner: recursion over operations, a walk over memory."""

import itertools
from functools import cache

import numpy as np
import pytest

from mindllm.errors import UserError
from mindllm.planning.plan import Plan
from mindllm.planning.problem import make_problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.recomputation.mixes import chains
from mindllm.planning.solve import Infeasible, solve, work_bound
from mindllm.planning.yaml_plan import read_yaml_plan, write_plan

NAMES = ("none", "full", "select", "both", "comm", "k5", "k6", "k7")
V_SHAPE = "zero_bubble_v"
LONGEST = 600.0  # seconds for what ends when it is proved: others may need the machine


def random_problem(
    seed, stages, layers, kinds=3, micro_batches=8, chunks=1, schedule="1f1b", layer_kinds=1, delay=0.0, working=False
):
    """Costs of a decoder that vary with the seed, and limits between tight and loose; ``working``: with working memory.

    In a V gradients of weights are a part of backward passes.
    """
    random = np.random.default_rng(seed)
    more = np.random.default_rng(seed)
    late = np.random.default_rng(seed) if schedule == V_SHAPE else None
    split = [layers] if layer_kinds == 1 else [first := int(random.integers(1, layers)), layers - first]
    parts = []
    for index, count in enumerate(split):
        scale = 1 - 0.4 * index
        forward, activation = 100 * scale * random.uniform(0.8, 1.2), 1000 * scale * random.uniform(0.8, 1.2)
        backward = forward * random.uniform(1.7, 2.2)
        costs = {"none": {"backward": backward, "activation_mb": activation}}
        if kinds > 1:
            costs["full"] = {"backward": backward + forward, "activation_mb": 0.05 * activation}
        for name in NAMES[2:kinds]:
            share = random.uniform(0.05, 0.95)
            again = forward * share**1.5 * random.uniform(0.9, 1.1)
            costs[name] = {"backward": backward + again, "activation_mb": activation * (1 - 0.95 * share)}
        if working:
            for cost in costs.values():
                cost["transient_mb"] = activation * more.uniform(0, 2)
        body = {"name": f"body{index}", "count": count, "forward": forward, "kinds": costs}
        body |= {"weight_gradient": backward * late.uniform(0.2, 0.6)} if late else {}
        parts.append({**body, "parameter_mb": random.uniform(300, 1500), "start_mb": more.uniform(0, 1500) * working})
    low, high = layers / stages * (1500 + 50 * stages), layers / stages * (1000 + 1000 * min(micro_batches, stages))
    fields = {
        "name": f"random {seed}",
        "stages": stages,
        "chunks": chunks,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "layers": parts,
        "head": {
            "forward": random.uniform(0, 30),
            "backward": random.uniform(0, 60),
            "memory_mb": random.uniform(0, 3000),
        },
        "tail": {
            "forward": random.uniform(0, 150),
            "backward": random.uniform(0, 300),
            "memory_mb": 3000.0,
            "transient_mb": more.uniform(0, 2000) * working,
        },
        "start_mb": more.uniform(0, 4000) * working,
        "update_mb": more.uniform(0, 8000) * working,
        "limit_mb": 4000 + low + random.uniform(0.05, 0.9) * (high - low),
        "point_to_point": delay,
    }
    for end in (fields["head"], fields["tail"]) if late else ():
        end["weight_gradient"] = end["backward"] * late.uniform(0, 0.9)
    return make_problem(fields, "random")


def judged(problem, plan, orders):
    """Step time and peak memory of every stage, from the orders of operations alone."""
    v_shape = problem.schedule == V_SHAPE
    stages, chunks = problem.stages, problem.chunks
    way = [c * stages + (stages - 1 - s if v_shape and c % 2 else s) for c in range(chunks) for s in range(stages)]
    layers, order = iter(problem.layer_order), {place: number for number, place in enumerate(way)}
    times, held, needed, again = {}, {}, {}, {}
    fixed, start = [0.0] * stages, list(problem.per_stage("start_mb"))
    for place in way:
        kinds = plan.places[place]
        mine = [problem.layers[next(layers)] for _ in kinds]
        ends = [problem.head] * (place == way[0]) + [problem.tail] * (place == way[-1])
        costs = [layer.kinds[kind] for layer, kind in zip(mine, kinds, strict=True)]
        forward, backward = (
            sum(x.forward for x in mine + ends),
            sum(cost.backward for cost in costs) + sum(e.backward for e in ends),
        )
        own = sum(x.weight_gradient for x in mine + ends)
        late = sum(c.backward - min(k.backward for k in x.kinds.values()) for x, c in zip(mine, costs, strict=True))
        times[place] = (forward, backward, own + late, backward - own)  # both halves compute layers again
        most = [max(k.activation_mb for k in x.kinds.values()) for x in mine]
        again[place] = [m - c.activation_mb for m, c in zip(most, costs, strict=True)]
        held[place] = [cost.activation_mb for cost in costs]
        needed[place] = [cost.transient_mb for cost in costs]
        start[place % stages] += sum(x.start_mb for x in mine)
        fixed[place % stages] += sum(x.parameter_mb for x in mine) + sum(e.memory_mb for e in ends)
    numbers = [{operation: number for number, operation in enumerate(one)} for one in orders]

    @cache
    def end(stage, index):
        what, chunk, micro = orders[stage][index]
        place = chunk * stages + stage
        begin = end(stage, index - 1) if index else 0.0
        source = None
        if what == 0 and place != way[0]:
            source = (way[order[place] - 1], (0,))
        elif what == 2:
            source = (place, (3,))
        elif what in (1, 3):
            source = (place, (0,)) if place == way[-1] else (way[order[place] + 1], (1, 3))
        if source:
            there = source[0] % stages
            wanted = [(kind, source[0] // stages, micro) for kind in source[1]]
            number = next(numbers[there][one] for one in wanted if one in numbers[there])
            begin = max(begin, end(there, number) + problem.point_to_point * (there != stage))
        return begin + times[place][what]

    peaks = []
    for stage, one in enumerate(orders):
        now = peak = 0.0
        for what, chunk, _ in one:
            place = chunk * stages + stage
            if what == 0:
                now += sum(held[place])
                continue
            if place == way[-1]:
                peak = max(peak, now + problem.tail.transient_mb)
            if v_shape:  # all that is computed again is there at once, and nothing is freed before the pass ends
                rest = max(need - more for need, more in zip(needed[place], again[place], strict=True))
                peak = max(peak, now + sum(again[place]) + max(0.0, rest))
                now -= sum(held[place]) if what != 3 else 0.0
                continue
            for size, work in zip(reversed(held[place]), reversed(needed[place]), strict=True):
                peak = max(peak, now + work)
                now -= size
        outside = max(start[stage], problem.per_stage("update_mb")[stage])
        peaks.append(fixed[stage] + max(outside, peak + problem.per_stage("static_mb")[stage]))
    for index in range(max(map(len, orders))):  # from early to late, so that recursion stays shallow
        for stage, one in enumerate(orders):
            if index < len(one):
                end(stage, index)
    return max(end(stage, len(one) - 1) for stage, one in enumerate(orders)), peaks


def every_plan(problem):
    """All plans whose mixes a YAML can say."""
    for cuts in itertools.combinations(range(1, problem.layer_count), problem.places - 1):
        counts = np.diff([0, *cuts, problem.layer_count])
        options = [list(mixes(problem, int(count))) for count in counts]
        for places in itertools.product(*options):
            yield Plan(tuple(places))


@cache
def _mixes(orders, count):
    found = set()
    for chain in orders:
        found |= set(itertools.combinations_with_replacement(chain, count))
    return tuple(found)


def mixes(problem, count):
    return _mixes(tuple(map(tuple, chains(problem))), count)


def hold_a_plan_to_what_it_says(problem, seconds, orders, rounding=0.0):
    """The plan of a problem beside the independent judge, its bound and the even split; what is written of it reads back.

    ``orders``: of a plan's evaluation the order of its operations. ``rounding``: of two sums of work, a part of them.
    """
    try:
        solution = solve(problem, seconds)
    except Infeasible:
        assert lightest_split(problem).missing_mb > 0
        return
    except UserError:
        return  # where others have the machine no plan may be found in that time
    best = solution.best
    step, peaks = judged(problem, best.plan, orders(best))
    assert step == pytest.approx(best.step_time, rel=1e-12)
    assert peaks == pytest.approx(best.peak_mb.tolist(), rel=1e-12)
    assert best.fits
    assert work_bound(problem) * (1 - rounding) <= solution.lower_bound <= best.step_time
    assert solution.even is None or best.step_time <= solution.even.step_time
    assert read_yaml_plan(problem, write_plan(problem, best.plan)) == best.plan
