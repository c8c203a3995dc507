"""Hidden states in single precision between layers that compute in half: traffic, messages and memory, as the compiled graph has
them."""

import re
from collections import Counter

import pytest
from small_cluster import cluster_run

from mindllm.compiled.graph.cost import bytes_of, cost
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.work import Exchange, Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import layer_bytes
from mindllm.timing.step import step_time
from mindllm.timing.step_work import spec_part, step_work

SUMS = ("Add", "AddN")


def run(wide, **sizes):
    """Two stages of two layers, their norms and sums split over two ranks."""
    model = {"fp32_residual_connection": wide, "num_layers": 4, "compute_dtype": "bfloat16"}
    return cluster_run(tp=2, pp=2, micro=2, model=model, use_seq_parallel=True, **sizes)


def both(**sizes):
    """Workloads with hidden states in half and in single precision."""
    return [workload_of(run(wide, **sizes)) for wide in (False, True)]


def traffic(workload, which):
    part = spec_part(workload, workload.architecture.layers[0], LayerAssignment(0))
    return sum(one.bytes for one in getattr(part, which) if isinstance(one, Operator))


def test_sums_of_hidden_states_take_twice_the_bytes_and_nothing_else_does():
    narrow, wide = both()
    numbers = wide.rank_tokens * wide.architecture.hidden_size / 2  # of a rank
    for which in ("forward", "backward"):
        assert traffic(wide, which) - traffic(narrow, which) == 2 * 6 * numbers  # two sums of three tensors
    parts = [spec_part(each, each.architecture.layers[0], LayerAssignment(0)) for each in (narrow, wide)]
    exchanged = [[one for one in (*part.forward, *part.backward) if isinstance(one, Exchange)] for part in parts]
    assert exchanged[0] == exchanged[1]


def test_messages_between_stages_and_inputs_of_recomputed_layers_are_twice_as_large():
    narrow, wide = both()
    assert step_work(wide).sent.bytes == 2 * step_work(narrow).sent.bytes
    sizes = [
        [layer_bytes(each, each.architecture.layers[0], LayerAssignment(0, recompute=again), each.rank_tokens)
         for each in (narrow, wide)]
        for again in (True, False)
    ]  # fmt: skip
    assert sizes[0][1] == 2 * sizes[0][0]
    assert sizes[1][1] == sizes[1][0]  # norms read single precision anyway, and that is kept


def test_a_step_is_longer_and_a_run_that_computes_in_single_precision_knows_no_other():
    narrow, wide = both()
    device = read_device(DEFAULT)
    assert step_time(wide, device).seconds > step_time(narrow, device).seconds
    whole = cluster_run(model={"fp32_residual_connection": True, "compute_dtype": "float32"})
    assert not workload_of(whole).numerics.wide_residual


@pytest.mark.slow
def test_the_compiled_graph_has_these_bytes():
    """To the byte: sums of hidden states, casts, and what goes to the next stage."""
    found = [Counter(), Counter()]
    for wide, counted in zip((False, True), found, strict=True):
        graph = compile_rank(run(wide), 0)
        for node in (node for function in graph.functions for node in function.nodes):
            if node.op == "Send":
                counted["sent"] = bytes_of(node.tensors)
            elif node.op in SUMS and re.search(r"layers\.\d+", node.path):
                counted["backward" if node.backward else "forward"] += cost(graph, node).bytes
            elif node.op == "Cast" and re.search(r"layers\.\d+$|norm$", node.path):
                counted["casts"] += cost(graph, node).bytes
    narrow, wide = both()
    for which in ("forward", "backward"):
        assert found[1][which] - found[0][which] == 2 * (traffic(wide, which) - traffic(narrow, which))  # two layers
    assert found[1]["casts"] == found[0]["casts"]
    assert found[1]["sent"] == 2 * found[0]["sent"]
    assert step_work(wide).sent.bytes / wide.strategy.model_parallel == found[1]["sent"]
