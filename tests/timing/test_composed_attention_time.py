"""Mask, softmax and dropout as kernels of their own: the bytes that a compiled rank reads and writes of them."""

import pytest
from small_cluster import cluster_run

from mindllm.compiled.graph.cost import cost
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.layer import backward_work, forward_work, repeated_work
from mindllm.timing.costs.work import VECTOR, Operator

HEADS, LENGTH, WIDTH = 4, 64, 32
MODEL = {"num_layers": 1, "hidden_size": WIDTH * HEADS, "num_heads": HEADS, "n_kv_heads": HEADS, "seq_length": LENGTH}
MODEL |= {"use_flash_attention": False, "compute_dtype": "bfloat16"}
BROADCAST = 0.03  # masks and numbers of tokens, which the model leaves out


def _run(**changes):
    return cluster_run(model={**MODEL, **changes}, runner_config={"batch_size": 2})


def _of_layer(config):
    run = workload_of(config)
    spec = run.architecture.layers[0]
    forward = forward_work(spec, float(run.rank_tokens), LENGTH, run.strategy, run.numerics)
    return forward, (*backward_work(forward), *repeated_work(forward, run.plan.layers[0]))


def _bytes(work, part):
    return sum(one.bytes for one in work if isinstance(one, Operator) and one.kind == VECTOR and part in one.name)


def _compiled_bytes(graph, shape, scope=""):
    """Bytes of all operators with results of this shape but products, forward and backward.

    Some gradients have the scope of another operator of their kind (MindSpore's), so a scope is for the forward pass.
    """
    found = [0.0, 0.0]
    for node in graph.nodes():
        if node.shapes[:1] == (shape,) and scope in node.scope and not node.op.endswith("MatMul"):
            found[node.backward or node.recomputed] += cost(graph, node).bytes
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"softmax_compute_type": "bfloat16", "attention_dropout": 0.1, "hidden_dropout": 0.1},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"attention_dropout": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["half softmax and dropout", "softmax in single precision", "casts and dropout"],
)
def test_a_compiled_rank_reads_and_writes_these_bytes_of_its_scores(changes):
    config = _run(**changes)
    graph = compile_rank(config, 0)
    forward, backward = _of_layer(config)
    sequences = int(workload_of(config).rank_tokens) // LENGTH
    told = [_bytes(work, "attention.softmax") + _bytes(work, "attention.dropout") for work in (forward, backward)]
    shape = (sequences, HEADS, LENGTH, LENGTH)
    assert _compiled_bytes(graph, shape) == pytest.approx(told, rel=BROADCAST)
    if config.model.config.hidden_dropout:
        states = (sequences * LENGTH, WIDTH * HEADS)
        found, _ = _compiled_bytes(graph, states, "_dropout-Dropout/")
        assert found == pytest.approx(_bytes(forward, "_dropout."), rel=BROADCAST)
