"""The time and memory of sequences that ranks share: closed forms, and what a compiled rank exchanges and computes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mindllm.architecture.layer_counts import layer_counts
from mindllm.compiled.graph.cost import bytes_of, cost
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import RecomputeConfig, load_config
from mindllm.config.model import ModelConfig
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import read_plan
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.attention import seen_keys
from mindllm.timing.costs.exchanges import ROUND, ROUND_AND_BACK, Group, exchange_seconds
from mindllm.timing.costs.layer import backward_work, forward_work
from mindllm.timing.costs.work import ATTENTION, HALF_BYTES, Exchange, Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.saved_activations import kept_results
from mindllm.timing.step import groups, step_time
from mindllm.timing.step_work import step_work
from mindllm.timing.workload import Numerics, Strategy, Workload

FORMS = Path(__file__).parents[2] / "mindllm/verify/forms"
DEVICE = read_device(DEFAULT)
LENGTH, HIDDEN, HEADS, KEY_HEADS, WIDTH = 1024, 512, 8, 2, 64
SIZES = {"vocab_size": 1000, "hidden_size": HIDDEN, "num_heads": HEADS, "n_kv_heads": KEY_HEADS, "seq_length": LENGTH}
GATHERED = {"context_parallel": 4}
HALVES = {"context_parallel": 4, "context_balanced": True}
OF_HEADS = {"context_parallel": 2, "exchanges_heads": True}
RING = {"context_parallel": 4, "passes_keys": True}
RING_IN_HALVES = {**RING, "context_balanced": True}


def workload(length=LENGTH, recompute=None, **strategy):
    architecture = ModelConfig.model_validate({**SIZES, "seq_length": length, "num_layers": 1}).architecture
    plan = read_plan(
        layer_counts(1, 1, 1, 0),
        RecomputeConfig.model_validate(recompute or {}),
        lambda key, said: UserError(key + said),
    )
    return Workload(architecture, length, Strategy(**strategy), plan)


def layer(run, numerics=None):
    spec = run.architecture.layers[0]
    return forward_work(spec, float(run.rank_tokens), run.seq_length, run.strategy, numerics or run.numerics)


def flops(work, kind):
    return sum(one.flops for one in work if isinstance(one, Operator) and one.kind == kind)


def exchanges(work):
    return [(one.name, one.op, one.bytes) for one in work if isinstance(one, Exchange) and one.axis == "cp"]


@pytest.mark.parametrize(
    ("form", "share"),
    [(HALVES, 1 / 4), (OF_HEADS, 1 / 2), (GATHERED, 1 / 4 * (1 - 1 / 8) / (1 / 2))],
    ids=["in halves", "of heads", "in order"],
)
def test_ranks_of_a_sequence_share_its_scores_as_their_parts_see_keys(form, share):
    """In consecutive parts the last of n ranks sees 1 - 1/(2n) of the keys, the mean is a half, and it is waited for."""
    alone, shared = (flops(layer(workload(**sizes)), ATTENTION) for sizes in ({}, form))
    assert shared == pytest.approx(share * alone)
    whole = Numerics(whole_masks=True)
    every = 4.0 * LENGTH * LENGTH * HEADS * WIDTH
    assert flops(layer(workload(**OF_HEADS), whole), ATTENTION) == every / 2


def test_keys_that_are_seen_are_counted_under_a_window():
    assert seen_keys(1000) == 500
    assert seen_keys(1000, 100) == pytest.approx(sum(min(query + 0.5, 100) for query in range(1000)) / 1000, rel=1e-4)
    assert seen_keys(1000, 100, first=750) == 100
    assert seen_keys(1000, first=750) == 875


@pytest.mark.parametrize("form", [GATHERED, HALVES, OF_HEADS], ids=["in order", "in halves", "of heads"])
def test_products_and_composed_attention_are_shared_out_evenly(form):
    composed = Numerics(fused_attention=False)
    alone, shared = (layer(workload(**sizes), composed) for sizes in ({}, form))
    assert flops(shared, "matrix") == pytest.approx(flops(alone, "matrix") / form["context_parallel"])
    widest = max(one.sizes[2] for one in shared if isinstance(one, Operator) and one.name == "attention.scores")
    assert widest == LENGTH


def test_keys_and_values_are_gathered_and_their_gradients_scattered():
    forward = layer(workload(**GATHERED))
    size = HALF_BYTES * LENGTH * KEY_HEADS * WIDTH
    assert [one[1:] for one in exchanges(forward)] == [("AllGather", size)] * 2
    assert [one[1:] for one in exchanges(backward_work(forward))] == [("ReduceScatter", size)] * 2


def test_heads_are_exchanged_before_attention_and_back_behind_it():
    forward = layer(workload(**OF_HEADS))
    queries, keys = (HALF_BYTES * LENGTH / 2 * count * WIDTH for count in (HEADS, KEY_HEADS))
    assert [one[1:] for one in exchanges(forward)] == [("AlltoAll", size) for size in (queries, keys, keys, queries)]
    names = [one.name for one in forward]
    assert names.index("attention.values.exchange") < names.index("attention.attention.flash_attention")
    assert names.index("attention.attention.flash_attention") < names.index("attention.results.exchange")


def test_keys_go_round_and_come_back_with_their_gradients():
    forward = layer(workload(**RING))
    size = HALF_BYTES * LENGTH / 4 * 2 * KEY_HEADS * WIDTH
    assert [one[1:] for one in exchanges(forward)] == [(ROUND, size)]
    assert [one[1:] for one in exchanges(backward_work(forward))] == [(ROUND_AND_BACK, size)]
    link, group = DEVICE.links[0], Group(4)
    step = link.latency.value + size / link.rate(2)
    assert exchange_seconds(ROUND, size, group, DEVICE) == pytest.approx(3 * step)
    assert exchange_seconds(ROUND_AND_BACK, size, group, DEVICE) == pytest.approx(7 * step)


def test_a_ring_computes_as_many_scores_as_the_rank_that_waits_least():
    for one, other in ((RING, GATHERED), (RING_IN_HALVES, HALVES)):
        assert flops(layer(workload(**one)), ATTENTION) == flops(layer(workload(**other)), ATTENTION)


def test_an_exchange_of_a_sequence_takes_the_links_between_its_ranks():
    """Eight tensor-parallel ranks fill a node of the default device: ranks of a sequence are on nodes of their own."""
    inside, between = (groups(Strategy(model_parallel=size, context_parallel=4))["cp"] for size in (2, 8))
    assert (inside, between) == (Group(4, 2), Group(4, 8))
    times = [exchange_seconds("AllGather", 1e8, group, DEVICE) for group in (inside, between)]
    outer = DEVICE.links[1]
    assert times[1] == pytest.approx(outer.latency.value + 1e8 * 3 / 4 / outer.rate(4))
    assert times[0] < times[1]


def test_ranks_of_a_sequence_are_replicas_to_weights():
    sizes = Strategy(data_parallel=2, context_parallel=4, model_parallel=2, optimizer_shard=True)
    assert (sizes.device_num, sizes.replica_num, groups(sizes)["dp"]) == (16, 8, Group(8, 2))
    update = step_work(workload(data_parallel=2, context_parallel=4, optimizer_shard=True)).updates[0]
    assert update.parameters.own(sizes) == update.parameters.trained / 8


def test_a_longer_sequence_takes_ranks_that_share_it_as_long():
    """What a token is computed with apart from scores costs no more on four ranks for a sequence four times as long."""
    composed = replace(workload(4096, **HALVES), numerics=Numerics())
    short, long = workload(), composed
    assert flops(layer(short), "matrix") == flops(layer(long), "matrix")
    assert long.rank_tokens == short.rank_tokens
    assert step_time(long, DEVICE).workload.tokens == 4 * 1024


def kept(run):
    """Bytes of results that a layer keeps."""
    spec = run.architecture.layers[0]
    return sum(kept_results(spec, run.rank_tokens, run.seq_length, run.strategy, run.numerics).values())


def test_ranks_keep_the_keys_that_they_gathered():
    sizes = [kept(workload(**form)) for form in ({}, GATHERED, HALVES, OF_HEADS, RING, RING_IN_HALVES)]
    alone, gathered, halves, of_heads, ring, ring_in_halves = sizes
    keys, results = HALF_BYTES * LENGTH * 2 * KEY_HEADS * WIDTH, HALF_BYTES * LENGTH * HEADS * WIDTH
    assert gathered == pytest.approx(alone / 4 + keys * 3 / 4)
    assert halves == pytest.approx(gathered + results / 4)
    assert of_heads == pytest.approx(alone / 2 + results / 2)
    assert ring == ring_in_halves == pytest.approx(alone / 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gather", "ulysses", "balanced", "ring", "ring_balanced"])
def test_a_compiled_rank_has_these_products_and_exchanges_for_its_sequences(name):
    """To the operation and to the byte. Of what is exchanged in half precision, heads alone are as wide as one."""
    changes = ["recompute_config.recompute=false", "runner_config.batch_size=1", "model.model_config.loss_chunks=1"]
    config = load_config(FORMS / f"context_parallel_{name}.yaml", [f"--{change}" for change in changes])
    graph, compiled = compile_rank(config, 0), Counter()
    heads = config.model.config.architecture.layers[0].attention
    ranks = config.parallel_config.context_parallel
    for node in (node for function in graph.functions for node in function.nodes):
        if node.op == "AlltoAllV":
            compiled[node.op] += bytes_of(node.tensors)
        elif node.op in ("AllGather", "ReduceScatter", "AlltoAll"):
            (tensor,) = node.tensors
            if (tensor.dtype, tensor.shape[-1]) != (config.model.config.compute_dtype, heads.head_dim):
                continue
            compiled[node.op] += bytes_of(node.tensors) * (ranks if node.op == "ReduceScatter" else 1)
        elif node.op in ("MatMul", "BatchMatMul"):
            compiled["products"] += cost(graph, node).products
    work, predicted = step_work(workload_of(config)), Counter()
    for part, count in work.places[0].items():
        for one in (*work.parts[part].forward, *work.parts[part].backward):
            if isinstance(one, Exchange) and one.op in (ROUND, ROUND_AND_BACK):
                steps = ranks - 1 if one.op == ROUND else 2 * ranks - 1
                predicted["AlltoAllV"] += one.bytes * count * steps
            elif isinstance(one, Exchange) and one.axis == "cp":
                predicted[one.op] += one.bytes * count
            elif isinstance(one, Operator) and one.sizes:
                predicted["products"] += one.flops * count
    assert predicted == compiled
