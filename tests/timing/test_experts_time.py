"""The time and memory of experts and latent attention: operators as the architecture and the compiled graph count them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.parts import FORWARD_AND_BACKWARD
from mindllm.compiled.graph.cost import bytes_of, cost
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import load_config
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.layer import backward_work, forward_work
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES, Exchange, Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import kept_bytes, stage_bytes
from mindllm.timing.non_layer_cost import Held, layer_parameters, place_parameters
from mindllm.timing.saved_activations import kept_results
from mindllm.timing.step import UNEVEN, step_time
from mindllm.timing.step_work import spec_part, step_work
from mindllm.timing.workload import Numerics, Strategy

FORMS = Path(__file__).parents[2] / "mindllm/verify/forms"
COMPOSED = Numerics(fused_attention=False)


def form(name, *overrides):
    return load_config(FORMS / f"{name}.yaml", overrides)


def passes(spec, tokens, length, strategy, numerics=COMPOSED):
    forward = forward_work(spec, float(tokens), length, strategy, numerics)
    return (*forward, *backward_work(forward))


@pytest.mark.parametrize(("capacity", "computed"), [(1.0, 1.0), (1.5, 1.5), (None, 4.0)])
def test_products_of_experts_are_those_of_their_places(capacity, computed):
    """With room for what an even router sends the architecture's own count; without a limit all experts see all tokens."""
    spec = workload_of(form("latent_attention")).architecture.layers[1]
    experts = replace(spec.feed_forward, capacity_factor=capacity)
    spec = replace(spec, feed_forward=experts)
    flops = sum(one.flops for one in passes(spec, 32, 16, Strategy()) if isinstance(one, Operator))
    chosen = FORWARD_AND_BACKWARD * experts.router.top_k * sum(a * b for a, b in experts.expert.matrices().values())
    assert flops == pytest.approx(32 * (spec.flops_per_token(16) + (computed - 1) * chosen))


def test_experts_of_sorted_tokens_compute_what_is_chosen_wherever_they_are():
    spec = workload_of(form("grouped_experts")).architecture.layers[0]
    flops = sum(one.flops for one in passes(spec, 32, 16, Strategy()) if isinstance(one, Operator))
    assert flops == pytest.approx(32 * spec.flops_per_token(16))
    shared = Strategy(4, expert_parallel=2)
    work = passes(spec, 8, 16, shared)
    assert 4 * sum(one.flops for one in work if isinstance(one, Operator)) == pytest.approx(flops)
    moved = [(one.op, one.bytes) for one in work if isinstance(one, Exchange) and one.axis == "ep"]
    bytes_moved = 2 * 8 * 2 * spec.attention.hidden_size  # in half precision, of both ranks of a group
    assert moved == [("AllGather", bytes_moved), ("ReduceScatter", bytes_moved)] * 2


def test_ranks_that_share_experts_keep_room_for_whatever_may_come():
    spec = workload_of(form("grouped_experts")).architecture.layers[0]
    alone, shared = (kept_results(spec, 8, 16, Strategy(4, expert_parallel=groups), COMPOSED) for groups in (1, 2))
    assert shared["feed_forward.experts.mul"] == 2 * alone["feed_forward.experts.mul"]
    places = replace(spec, feed_forward=replace(spec.feed_forward, grouped=False))
    chosen = spec.feed_forward.router.top_k / spec.feed_forward.router.experts
    with_places = kept_results(places, 16, 16, Strategy(4), COMPOSED)["feed_forward.experts.mul"]
    assert 2 * alone["feed_forward.experts.mul"] == chosen * with_places


def test_tokens_that_are_sent_keep_room_for_an_even_share():
    """However many ranks share the experts; beside them rows of zeros, one for each rank."""
    spec = workload_of(form("sent_tokens")).architecture.layers[0]
    alone, two, four = (
        kept_results(spec, 8, 16, Strategy(4, expert_parallel=groups), COMPOSED) for groups in (1, 2, 4)
    )
    rows = 8 * spec.feed_forward.router.top_k
    assert two["feed_forward.experts.mul"] == alone["feed_forward.experts.mul"] * (rows + 2) / rows
    assert four["feed_forward.experts.mul"] == alone["feed_forward.experts.mul"] * (rows + 4) / rows
    moved = [one for one in passes(spec, 8, 16, Strategy(4, expert_parallel=2)) if isinstance(one, Exchange)]
    of_rows = [one.name.rpartition(".")[2] for one in moved if one.bytes == 2 * (rows + 2) * spec.attention.hidden_size]
    assert of_rows == ["send", "send_back", "send_back", "send"]
    without_gradient = [one.name.rpartition(".")[2] for one in moved if one.op in ("AlltoAll", "AlltoAllV")]
    assert sorted({*without_gradient} - {*of_rows}) == ["counts", "numbers"]
    assert len(without_gradient) == 6


def test_a_step_says_that_an_uneven_router_is_not_in_it():
    device = read_device(DEFAULT)
    found = {name: step_time(workload_of(form(name)), device).uncounted for name in ("sent_tokens", "grouped_experts")}
    assert found == {"sent_tokens": (UNEVEN,), "grouped_experts": ()}


@pytest.mark.parametrize(("groups", "ranks"), [(1, 2), (2, 2), (4, 1)])
def test_devices_share_what_experts_compute_and_hold(groups, ranks):
    """Of two replicas with two ranks each: all devices together compute what one would, and hold it as often as said."""
    spec = workload_of(form("experts_and_tensor_parallel")).architecture.layers[1]
    shared = Strategy(2, 2, expert_parallel=groups, expert_model_parallel=ranks)

    def flops(strategy):
        work = passes(spec, 32 / strategy.data_parallel, 16, strategy)
        return sum(one.flops for one in work if isinstance(one, Operator) and ".experts." in one.name)

    assert 4 * flops(shared) == pytest.approx(flops(Strategy()))
    alone, own = (layer_parameters(spec, strategy) for strategy in (Strategy(), shared))
    assert own.experts * groups * ranks == alone.experts
    assert own.own(replace(shared, optimizer_shard=True)) == own.trained / 2 + own.experts / (4 // groups // ranks)
    assert Held(1.0, 2.0, 3.0) + Held(experts=1.0) == Held(1.0, 2.0, 4.0)


def test_ranks_of_an_expert_that_are_fewer_than_tensor_parallel_ones_gather_its_results():
    spec = workload_of(form("experts_and_tensor_parallel")).architecture.layers[1]
    whole, split = (
        [one for one in passes(spec, 32, 16, Strategy(2, 2, expert_parallel=2, expert_model_parallel=ranks))
         if isinstance(one, Exchange) and ("arrive" in one.name or "depart" in one.name)]
        for ranks in (1, 2)
    )  # fmt: skip
    assert [one.op for one in split] == ["AlltoAll"] * 4
    assert sorted(one.op for one in whole) == ["AllGather", *["AlltoAll"] * 4, "ReduceScatter"]
    assert {one.bytes for one in whole if one.op == "AlltoAll"} == {one.bytes / 2 for one in split}


def test_a_shared_expert_alone_leaves_sums_to_add():
    spec = workload_of(form("experts_and_tensor_parallel")).architecture.layers[1]
    lonely = replace(spec, feed_forward=replace(spec.feed_forward, shared=None, shared_gate=False))
    names = [{one.name for one in passes(each, 32, 16, Strategy(1, 2))} for each in (spec, lonely)]
    assert names[0] - names[1] >= {"feed_forward.reduce", "feed_forward.shared.w1.matmul"}


def test_experts_keep_their_places_and_recomputation_frees_them():
    run = workload_of(form("experts_and_tensor_parallel", "--recompute_config.recompute=false"))
    again = workload_of(form("experts_and_tensor_parallel", "--recompute_config.recompute=true"))
    assert isinstance(run.architecture.layers[1].feed_forward, ExpertsSpec)
    assert kept_bytes(run)[1] > 1.5 * kept_bytes(run)[0] > 1.5 * kept_bytes(again)[1]
    tighter = replace(run.architecture.layers[1].feed_forward, capacity_factor=0.5)
    layers = (run.architecture.layers[0], replace(run.architecture.layers[1], feed_forward=tighter))
    limited = replace(run, architecture=replace(run.architecture, layers=layers))
    assert kept_bytes(limited)[1] < 0.7 * kept_bytes(run)[1]
    assert stage_bytes(limited) < stage_bytes(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ()) for name in ("experts", "experts_and_tensor_parallel", "latent_attention", "sent_tokens")),
        ("sent_tokens", ("--recompute_config.recompute=true",)),
    ],
)
def test_a_compiled_rank_has_these_products_and_exchanges(name, options):
    """To the operation and to the byte: what ``Exchange`` says of AlltoAll, and all matrix products."""
    config = form(name, *options)
    graph = compile_rank(config, 0)
    compiled = Counter()
    for node in (node for function in graph.functions for node in function.nodes):
        if node.op in ("AlltoAll", "AlltoAllV"):
            compiled[node.op] += bytes_of(node.tensors)
        elif node.op in ("MatMul", "BatchMatMul", "GroupedMatmul"):
            compiled["products"] += cost(graph, node).products
    work, predicted = step_work(workload_of(config)), Counter()
    for part, count in (pair for place in work.places for pair in place.items()):
        for one in (*work.parts[part].forward, *work.parts[part].backward, *work.parts[part].repeated):
            if isinstance(one, Exchange) and one.op in ("AlltoAll", "AlltoAllV"):
                predicted[one.op] += one.bytes * count
            elif isinstance(one, Operator) and one.sizes:
                predicted["products"] += one.flops * count
    assert predicted == compiled


def test_a_layer_that_predicts_ahead_takes_its_projection_and_a_head():
    one_device = ("data_parallel=1", "model_parallel=1", "use_seq_parallel=false")
    workload = workload_of(form("prediction_layers", *(f"--parallel_config.{change}" for change in one_device)))
    architecture, spec = workload.architecture, workload.architecture.layers[-1]
    part = spec_part(workload, spec, LayerAssignment(1, recompute=True))
    tokens, hidden = workload.strategy.micro_batch_size * workload.seq_length, architecture.hidden_size
    for name, size in (("eh_proj", 2 * hidden * hidden), ("ahead.lm_head", hidden * architecture.vocab_size)):
        flops = sum(one.flops for one in (*part.forward, *part.backward) if one.name.startswith(f"{name}.matmul"))
        assert flops == FORWARD_AND_BACKWARD * tokens * size
    assert "ahead.embedding.lookup" in {one.name for one in part.forward}
    again = {one.name for one in part.repeated}
    assert "eh_proj.matmul" in again
    assert not any(name.startswith("ahead.") for name in again)
    held, layers = place_parameters(workload, 1, range(1, 3)), architecture.layers[1:]
    table = architecture.vocab_size * hidden
    tables = Held(trained=2 * table, state=-2 * FP32_BYTES * table, made=HALF_BYTES * table)
    # Its head, which is cast, and what is looked up: the first stage has moments of that.
    assert held == sum((layer_parameters(layer, workload.strategy) for layer in layers), tables)
