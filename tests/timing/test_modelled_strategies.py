"""Orders of micro-batches, parts of accumulators and of optimizer state, experts and latent attention beside shared sequences."""

import json
from collections import Counter
from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.compiled.graph.cost import bytes_of, cost
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import load_config
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.exchanges import Group
from mindllm.timing.costs.work import Exchange, Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import layer_needs, left_of_layer, stage_bytes, state_bytes
from mindllm.timing.non_layer_cost import layer_parameters
from mindllm.timing.pass_times import PassTimes
from mindllm.timing.step import groups, step_seconds, step_time
from mindllm.timing.step_work import step_work
from mindllm.timing.workload import Strategy

FORMS = Path(__file__).parents[2] / "mindllm/verify/forms"
DEVICE = read_device(DEFAULT)
EXCHANGES = ("AllGather", "ReduceScatter", "AlltoAll", "AllReduce")
PLAIN = ("recompute_config.recompute=false", "model.model_config.loss_chunks=1")


PARTS = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"gradient_accumulation_shard": True}}


def piped(**optimizer):
    """Two stages and two replicas, four micro-batches."""
    parallel = {"enable_parallel_optimizer": True, "parallel_optimizer_config": optimizer}
    return workload_of(cluster_run(dp=2, pp=2, micro=4, parallel=parallel))


def test_gpipe_takes_all_passes_forward_and_then_backward_and_holds_every_micro_batch():
    changes = ["--parallel.pipeline_config.pipeline_scheduler=1f1b"]
    gpipe, usual = (workload_of(load_config(FORMS / "gpipe.yaml", given)) for given in ([], changes))
    assert (gpipe.strategy.schedule, usual.strategy.schedule) == ("gpipe", "1f1b")
    first = step_time(gpipe, DEVICE)
    assert first.times.schedule == "gpipe"
    forward = sum(one.seconds for one in first.forward[::2]) * gpipe.strategy.micro_batches
    assert (
        first.line.makespan >= forward + sum(one.seconds for one in first.backward[::2]) * gpipe.strategy.micro_batches
    )
    assert first.seconds == pytest.approx(step_seconds(gpipe, [DEVICE])[0])
    assert stage_bytes(gpipe)[1] > stage_bytes(usual)[1]


def test_a_v_is_even_and_computes_layers_again_in_both_halves_of_a_backward_pass():
    changes = ["--parallel.pipeline_config.pipeline_scheduler=1f1b"]
    v, usual = (workload_of(load_config(FORMS / "zero_bubble_v.yaml", given)) for given in ([], changes))
    first = step_time(v, DEVICE)
    assert first.times.schedule == "zero_bubble_v"
    assert first.seconds == pytest.approx(step_seconds(v, [DEVICE])[0])
    assert PassTimes.of_tree(json.loads(json.dumps(first.times.tree()))) == first.times
    assert all(0 < weight < backward for weight, backward in zip(first.times.weight, first.times.backward, strict=True))
    assert first.times.again == (0.0,) * 4
    assert step_work(v).places[2]["head"] == step_work(usual).places[3]["head"] == 1
    assert step_work(v).updates[1].parameters.updated < step_work(usual).updates[1].parameters.updated  # no head
    whole = workload_of(load_config(FORMS / "zero_bubble_v.yaml", ["--recompute_config.recompute=true"]))
    again = step_time(whole, DEVICE).times
    assert all(0 < twice < weight for twice, weight in zip(again.again, again.weight, strict=True))


def test_pieces_fill_a_pipeline_and_keep_what_each_multiplied_with():
    scheduler = {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "seqpipe"}}
    model = {"num_layers": 4, "seq_length": 8192, "hidden_size": 1024, "intermediate_size": 4096}
    whole, cut = (
        workload_of(cluster_run(pp=4, micro=4, model=model, parallel=scheduler, seq_split_num=pieces))
        for pieces in (1, 4)
    )
    step = step_time(cut, DEVICE)
    assert step.seconds == pytest.approx(step_seconds(cut, [DEVICE])[0])
    assert step.seconds < step_time(whole, DEVICE).seconds
    assert PassTimes.of_tree(json.loads(json.dumps(step.times.tree()))) == step.times
    assert any("pieces" in one for one in step.uncounted)
    one, all_at_once = layer_needs(cut, cut.architecture.layers[0], cut.plan.layers[0])[0], whole.rank_tokens
    keys = 2 * 2 * all_at_once * 2 * 256  # of two heads in half precision, and values
    weights = 2 * (2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 4096)
    of_whole = layer_needs(whole, whole.architecture.layers[0], whole.plan.layers[0])[0]
    assert one == (of_whole - weights) / 4 + keys + weights  # a pass casts matrices, be it of a whole or of a piece


def test_equal_pieces_leave_a_bubble_of_as_many_times_less():
    stages, micro, pieces = 4, 4, 8
    one = PassTimes(stages, 1, micro, (1.0,) * stages, (2.0,) * stages, schedule="seqpipe", pieces=pieces)
    assert one.simulated().makespan == 3.0 * (micro * pieces + stages - 1)


def test_accumulators_in_parts_are_given_theirs_with_every_micro_batch_and_hold_a_part():
    whole, cut = (piped(gradient_accumulation_shard=shard) for shard in (False, True))
    sums = [[one.op for one in step_work(run).updates[0].exchanges] for run in (whole, cut)]
    assert sums == [["ReduceScatter", "AllGather"], ["ReduceScatter"] * 4 + ["AllGather"]]
    assert step_time(cut, DEVICE).seconds > step_time(whole, DEVICE).seconds
    held = step_work(whole).updates[0].parameters
    assert state_bytes(held, whole) - state_bytes(held, cut) == 4 * (held.updated - held.own(cut.strategy))
    layer = layer_parameters(cut.architecture.layers[0], cut.strategy)
    assert left_of_layer(cut, cut.architecture.layers[0]) == 4 * layer.trained * (1 + 1 / 2)  # until a pass ends
    split = workload_of(cluster_run(dp=2, tp=2, pp=2, micro=4, parallel=PARTS))
    assert left_of_layer(split, split.architecture.layers[0]) == 0.0  # or a layer's exchange is waited for


@pytest.mark.parametrize(("share", "shards"), [(2, 2), (-1, 4), (3, 4)])
def test_replicas_share_optimizer_state_as_they_divide(share, shards):
    """MindSpore takes all replicas where the share does not divide them."""
    strategy = Strategy(data_parallel=4, optimizer_shard=True, optimizer_ranks=share if share > 0 else None)
    assert (strategy.shards(4), Strategy(data_parallel=4).shards(4)) == (shards, 1)


def test_parts_of_the_optimizer_state_are_summed_among_those_who_have_the_same():
    run = workload_of(load_config(FORMS / "shared_optimizer_state.yaml", ["--parallel_config.model_parallel=2"]))
    update = step_work(run).updates[0]
    size = 4 * update.parameters.trained
    assert [(one.op, one.axis, one.bytes) for one in update.exchanges] == [
        ("ReduceScatter", "share", size),
        ("AllReduce", "shares", size / 2),
        ("AllGather", "share", size / 2),
    ]
    assert update.parameters.own(run.strategy) == update.parameters.trained / 2
    found = groups(run.strategy)
    assert (found["share"], found["shares"]) == (
        Group(2, 2),
        Group(2, 4),
    )  # ranks (0, 2) and (0, 4) of the compiled graph


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("context_parallel_experts", ["parallel_config.expert_parallel=4", "runner_config.batch_size=1"]),
        pytest.param("context_parallel_experts", [], marks=pytest.mark.slow),
        pytest.param("context_parallel_gather", [], marks=pytest.mark.slow),
        pytest.param("context_parallel_ulysses", [], marks=pytest.mark.slow),
        pytest.param(
            "context_parallel_latent_attention",
            ["parallel_config.model_parallel=1", "parallel_config.use_seq_parallel=false"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["experts of all ranks", "experts", "several sequences", "several sequences, heads", "latent attention"],
)  # fmt: skip
def test_a_compiled_layer_exchanges_these_bytes_along_a_sequence(name, changes):
    """Forward, to the byte and by kind; products to the operation. Scores of the router and tables of positions are left out."""
    config = load_config(FORMS / f"{name}.yaml", [f"--{change}" for change in (*PLAIN, *changes)])
    graph, compiled = compile_rank(config, 0), Counter()
    half = config.model.config.compute_dtype
    for node in (node for function in graph.functions for node in function.nodes):
        if (
            node.op in EXCHANGES
            and not node.backward
            and ".layers." in node.path
            and node.instance.startswith("redistribution")
        ):
            inside = any(part in node.path for part in (".w1", ".w3", ".wq", ".wk", ".wv", "wkv_down", "wq_down"))
            if node.tensors[0].dtype == half and not inside:
                compiled[node.op] += max(bytes_of(graph.input_tensors(node)), bytes_of(node.tensors))
        elif node.op in ("MatMul", "BatchMatMul"):
            compiled["products"] += cost(graph, node).products
    work, predicted = step_work(workload_of(config)), Counter()
    axes = ("cp", "ep over cp")
    sizes = {axis: group.size for axis, group in groups(work.workload.strategy).items()}
    for part, count in work.places[0].items():
        for one in work.parts[part].forward:
            if isinstance(one, Exchange) and one.axis in axes and sizes[one.axis] > 1:
                predicted[one.op] += one.bytes * count
        both = (*work.parts[part].forward, *work.parts[part].backward)
        predicted["products"] += sum(one.flops for one in both if isinstance(one, Operator) and one.sizes) * count
    assert predicted == compiled
