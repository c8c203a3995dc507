"""Muon's update in the model of time and in the formula of memory: what the compiled rank computes, exchanges and moves."""

import math
from collections import Counter
from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.architecture.optimizer_state import MUON, state_shapes
from mindllm.compiled.graph.cost import bytes_of, cost
from mindllm.compiled.graph.operators import UPDATE, Operators
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.compiled.simulation.simulate_rank import simulate_rank
from mindllm.config import load_config
from mindllm.planning.costs.formula import KINDS, plan_problem, run_plan
from mindllm.planning.plan import evaluate
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.exchanges import Group
from mindllm.timing.costs.work import FP32_BYTES, Exchange
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes, update_working_bytes
from mindllm.timing.non_layer_cost import embedding_parameters, layer_parameters
from mindllm.timing.step import groups, step_time
from mindllm.timing.step_work import step_work
from mindllm.timing.weight_memory import more_at_update
from mindllm.units import MIB
from tests.compiled.simulations import needs_compiler

FORMS = Path(__file__).parents[2] / "mindllm/verify/forms"
FORM = FORMS / "orthogonal_updates.yaml"
DEVICE = read_device(DEFAULT)
OF_MATRICES = ("Add", "Assign", "Mul", "Muls", "ReduceSum", "Square", "StridedSlice", "Sub", "Transpose")
NO_SHARDS = "parallel.enable_parallel_optimizer=false"
ONE_RANK = ("parallel_config.model_parallel=1", "parallel_config.use_seq_parallel=false")
WIDE = {
    "hidden_size": 1024,
    "num_heads": 8,
    "n_kv_heads": 8,
    "intermediate_size": 2816,
    "num_layers": 4,
    "seq_length": 64,
    "vocab_size": 512,
}
ALONE = {"model": WIDE, "optimizer": {"type": MUON}}
OF_EXPERTS = {
    "num_layers": 2,
    "model_type": "mixtral",
    "expert_num": 8,
    "num_experts_chosen": 2,
    "intermediate_size": 1024,
    "capacity_factor": 1.0,
}
MIXTURE = {**ALONE, "model": {**WIDE, **OF_EXPERTS}}
SHARED = {
    **ALONE,
    "dp": 2,
    "tp": 2,
    "pp": 2,
    "micro": 2,
    "use_seq_parallel": True,
    "parallel": {"enable_parallel_optimizer": True},
}


def compiled_update(config):
    """Of matrices in a rank's update: operations, bytes exchanged by kind and group, bytes that other operators move."""
    graph = compile_rank(config, 0)
    operators, found = Operators(graph), Counter()
    for node in operators.nodes:
        if operators.phase(node) != UPDATE or "global_norm" in node.path or ".plain" in node.path:
            continue
        if node.op in ("MatMul", "BatchMatMul"):
            found["products"] += cost(graph, node).products
            found["bytes"] += cost(graph, node).bytes
        elif node.op == "AllGather":
            found[node.op, len(node.ranks)] += bytes_of(node.tensors)
        elif node.op in OF_MATRICES and not any("accu_grads" in name for name in node.inputs):
            found["bytes"] += cost(graph, node).bytes
    return found


def modelled_update(config):
    """The same of the first stage's update in the model of time, but for gradients' norm and copies in half precision."""
    work = step_work(workload_of(config))
    sizes, found = groups(work.workload.strategy), Counter()
    for part in work.updates[0].beside:
        for one in part.work:
            if isinstance(one, Exchange):
                found[one.op, sizes[one.axis].size] += part.times * one.bytes
            elif not one.name.endswith(".norm"):
                found["products"] += part.times * one.flops
                found["bytes"] += part.times * one.bytes
    return found


@pytest.mark.parametrize(
    "changes",
    [
        (),
        pytest.param((NO_SHARDS, "optimizer.qk_clip_threshold=100"), marks=pytest.mark.slow),
        pytest.param((*ONE_RANK, "optimizer.ns_steps=3", "optimizer.nesterov=false"), marks=pytest.mark.slow),
    ],
    ids=["tensor parallel ranks and shards", "tensor parallel ranks that scale heads", "shards"],
)
def test_a_compiled_rank_has_these_products_and_exchanges(changes):
    """To the operation and to the byte; what is read and written beside that but for single numbers."""
    config = load_config(FORM, [f"--{change}" for change in changes])
    compiled, predicted = compiled_update(config), modelled_update(config)
    moved = compiled.pop("bytes"), predicted.pop("bytes")
    assert predicted == compiled
    assert moved[1] == pytest.approx(moved[0], rel=1e-3)


@pytest.mark.parametrize(
    ("form", "experts"),
    [
        ("experts_and_tensor_parallel", {("AllGather", 2): 4 * 3 * 2 * 64 * 32}),
        pytest.param("experts", {}, marks=pytest.mark.slow),
    ],
    ids=["parts of experts", "experts that replicas share"],
)
def test_a_compiled_rank_has_these_products_of_its_experts(form, experts):
    """To the operation and to the byte. Of two experts' three matrices parts are put together; of whole ones nothing is."""
    config = load_config(FORMS / f"{form}.yaml", [f"--optimizer.type={MUON}"])
    compiled, predicted = compiled_update(config), modelled_update(config)
    moved = compiled.pop("bytes"), predicted.pop("bytes")
    assert predicted == compiled
    assert moved[1] == pytest.approx(moved[0], rel=1e-3)
    work = [one for part in step_work(workload_of(config)).updates[0].beside for one in part.work]
    found = Counter()
    for one in work:
        if isinstance(one, Exchange) and ".experts." in one.name:
            found[one.op, groups(workload_of(config).strategy)[one.axis].size] += one.bytes
    assert found == experts


def test_every_expert_is_one_product_more():
    """Of sides 64 and 32, three matrices, in one layer of two; and of those of a rank replicas that share them have a part."""
    flops = lambda *options: modelled_update(  # noqa: E731
        load_config(FORMS / "experts_and_tensor_parallel.yaml", [f"--optimizer.type={MUON}", *options])
    )["products"]
    of_one = 3 * 5 * (4 * 32 * 32 * 64 + 2 * 32**3)
    router = lambda experts: 5 * (4 * experts**2 * 64 + 2 * experts**3)  # noqa: E731
    more = flops("--model.model_config.expert_num=8") - router(8) - flops() + router(4)
    assert more == 2 * of_one
    replicas = ("--parallel_config.data_parallel=4", "--model.model_config.expert_num=8")
    assert flops(*replicas) - router(8) == flops() - router(4)
    undivided = (
        "--parallel_config.data_parallel=12",
        "--model.model_config.expert_num=8",
    )  # replicas do not divide four experts
    assert flops(*undivided) - router(8) == flops() - router(4) + 2 * of_one


def test_experts_that_replicas_do_not_divide_are_updated_by_all():
    """Eight replicas share no state of four experts: each has it, and gradients are summed over all."""
    options = ("--parallel_config.data_parallel=16", "--model.model_config.expert_num=8")
    whole = load_config(FORMS / "experts_and_tensor_parallel.yaml", list(options))
    shared = load_config(FORMS / "experts_and_tensor_parallel.yaml", ["--parallel_config.data_parallel=8", options[1]])
    for config, own, op in ((whole, 1, "AllReduce"), (shared, 4, "ReduceScatter")):
        workload = workload_of(config)
        held = layer_parameters(workload.architecture.layers[1], workload.strategy)
        experts = 8 * 3 * 64 * 32 / 4
        assert held.experts == experts
        assert held.own(workload.strategy) - held.trained / workload.strategy.replica_num == experts / own
        sums = [one.op for one in step_work(workload).updates[0].exchanges if one.name == "gradients of experts"]
        assert sums == [op]


def test_weights_whose_heads_are_scaled_are_read_and_written_once_more():
    """Query and key of one layer, of 64 and 32 rows of 64, in four parts."""
    plain, clipped = (
        modelled_update(load_config(FORM, options)) for options in ([], ["--optimizer.qk_clip_threshold=100"])
    )
    assert clipped.pop("bytes") - plain.pop("bytes") == 2 * FP32_BYTES * (64 + 32) * 64 / 4
    assert clipped == plain


def test_the_whole_update_is_done_on_every_device_and_is_part_of_the_step():
    alone, shared = (workload_of(cluster_run(**run)) for run in (ALONE, SHARED))
    flops = [sum(one.flops for part in step_work(run).updates[0].beside for one in part.work if hasattr(one, "flops"))
             for run in (alone, shared)]  # fmt: skip
    wide, high = WIDE["hidden_size"], WIDE["intermediate_size"]
    expected = 4 * 5 * 6 * wide**3 + 3 * 5 * (4 * wide * wide * high + 2 * wide**3)
    assert flops == [expected, expected]
    by_adamw = workload_of(cluster_run(**{**ALONE, "optimizer": {}}))
    more = step_time(alone, DEVICE).ends[0].update - step_time(by_adamw, DEVICE).ends[0].update
    assert more > 4 * expected / DEVICE.matrix_rate("float32")
    assert groups(shared.strategy)["tp and share"] == Group(4)


def test_state_is_that_of_checkpoints():
    run = workload_of(cluster_run(**ALONE))
    spec = run.architecture.layers[0]
    shapes = {f"model.layers.0.{name}": shape for name, shape in spec.weights().items()}
    held = layer_parameters(spec, run.strategy, rule=run.update)
    state = sum(FP32_BYTES * math.prod(shape) for shape in state_shapes(shapes, MUON).values() if shape)
    assert held.trained * 2 * FP32_BYTES + held.state == state
    assert layer_parameters(spec, run.strategy).state == 0


@pytest.mark.parametrize(
    ("run", "found"),
    [(ALONE, 629.3), (SHARED, 164.2), (MIXTURE, 836.4)],
    ids=["one device", "eight devices", "experts"],
)
def test_the_formula_is_near_the_dry_run_whose_peak_is_the_update(run, found):
    """MB of rank 0; found by the simulation below. Weights in half precision, which the formula counts, are gone by then."""
    workload = workload_of(cluster_run(**run))
    assert stage_bytes(workload)[0] / MIB == pytest.approx(found, rel=0.03)
    assert update_working_bytes(workload) / MIB > 20


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("run", "found"), [(ALONE, 629.3), (MIXTURE, 836.4)], ids=["dense", "experts"])
def test_matrices_are_updated_one_after_the_other(run, found):
    """What is made of weight and momentum of all dense matrices at once would be 196 MB more."""
    assert simulate_rank(cluster_run(**run), 0).used_peak / MIB == pytest.approx(found, abs=1)


def test_the_planner_and_the_formula_say_the_same_where_the_update_is_the_peak():
    config = cluster_run(**SHARED)
    workload = workload_of(config)
    problem = plan_problem(workload, DEVICE, 1024 * MIB, "run")
    peaks = evaluate(problem, run_plan(config, dict(KINDS))).peak_mb
    assert peaks.tolist() == pytest.approx([size / MIB for size in stage_bytes(workload)])
    table = embedding_parameters(workload)
    working, gone = update_working_bytes(workload) / MIB, more_at_update(table, workload) / MIB
    assert gone == (table.trained * 4 / 4 - table.trained * 4) / MIB  # it was gathered; its gradient is a part
    assert problem.per_stage("start_mb") == (working + gone, working)
