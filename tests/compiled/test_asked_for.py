"""What a YAML asks for against graphs that have it, and against graphs that have something else and compute the same."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from conftest import CASES
from small_cluster import cluster_run

from mindllm.compiled.conformance import Finding, findings
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node

ALL = "interleaved all"
THRESHOLD = "dp2 tp2, parts below the threshold"
BALANCED = "cp2 balanced halves"  # whose attention scores a sequence in two pieces
ACCUMULATING = ("dp2 accumulating", "dp2 accumulating, zero-centred norms")
"""Of the second one, sums of gathered weights serve both parts of a batch."""


def asked(graph: CompiledGraph, name: str, **changes: Any) -> dict[str, Finding]:
    """What the configuration of a case, with sections or sizes changed, finds in a graph."""
    run = CASES[name][1]
    merged = {
        key: {**run.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    return {finding.what: finding for finding in findings(cluster_run(**{**run, **merged}), [graph])}


def violated(found: dict[str, Finding]) -> dict[str, tuple[str, ...]]:
    return {what: finding.problems for what, finding in found.items() if not finding.holds}


def changed(graph: CompiledGraph, where, **fields: Any) -> CompiledGraph:
    """A copy of a graph with fields of some nodes replaced."""
    functions = tuple(
        replace(function, nodes=tuple(replace(node, **fields) if where(node) else node for node in function.nodes))
        for function in graph.functions
    )
    return replace(graph, functions=functions)


def compiled_case(name: str, *marks: pytest.MarkDecorator):
    return pytest.param(name, marks=[pytest.mark.compiles(name), *marks])


@pytest.mark.parametrize(
    "name",
    [
        *map(
            compiled_case,
            (
                ALL,
                "all",
                *ACCUMULATING,
                THRESHOLD,
                "tp2 sequence, rows in parts",
                "dp2 optimizer level 3",
                "select",
                BALANCED,
            ),
        ),
        *(compiled_case(name, pytest.mark.slow) for name in ("dp4 shared optimizer state", "full", "comm")),
    ],
)
def test_a_graph_is_what_its_own_yaml_asks_for(compiled, name):
    assert violated(asked(compiled(name), name)) == {}


@pytest.mark.compiles(
    "full without communication", "full without silu", "composed", "tied tp2", "dp2 accumulating, optimizer"
)
@pytest.mark.parametrize(
    "name",
    [
        "full without silu",
        "tied tp2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("full without communication", "composed", "dp2 accumulating, optimizer")
        ),
    ],
)
def test_so_it_is_in_other_forms(compiled, name):
    assert violated(asked(compiled(name), name)) == {}


@pytest.mark.compiles(ALL)
def test_what_was_asked_for_and_found_is_told(compiled):
    found = {what: (finding.asked, finding.found) for what, finding in asked(compiled(ALL), ALL).items()}
    assert found["layers by stage"] == ("0-1, 3 | 2, 4-5", "2, 4-5")  # the graph of one rank of the second stage
    assert found["chunks by stage"] == (" | 2 then 4-5", " | 2 then 4-5")
    assert found["parts of a batch"] == ("4", "4")
    assert found["recomputation"][1] == "all of layers 4, operators of layers 2, 5"
    assert found["optimizer parallel"] == ("optimizer state: 29 weights", "29 weights")
    assert found["gradient fusion"] == ("1 message, the same on all ranks", "1 message")
    assert found["shardings"][0] == "dp2 tp2 sequence parallel"


@pytest.mark.compiles(BALANCED)
def test_a_piece_of_a_sequence_that_is_scored_twice(compiled):
    graph = compiled(BALANCED)
    (late, early) = graph.find("FlashAttentionScore", lambda node: ".layers.0." in node.path)

    def with_another(node: Node) -> list[Node]:
        return [node, replace(node, name=f"{node.name}_again")] if node.name == late.name else [node]

    functions = tuple(
        replace(function, nodes=tuple(copy for node in function.nodes for copy in with_another(node)))
        for function in graph.functions
    )
    assert late.shapes[0] == early.shapes[0]
    found = violated(asked(replace(graph, functions=functions), BALANCED))
    assert found == {"parts of a batch": ("rank 1: layer 0 runs 3/2 times in a step, not 1",)}


@pytest.mark.compiles("dp2")
def test_optimizer_parallel_that_was_dropped(compiled):
    found = violated(asked(compiled("dp2"), "dp2", parallel={"enable_parallel_optimizer": True}))
    assert list(found) == ["optimizer parallel"]
    assert (
        "rank 1: model.layers.0.attention.wq.weight is in 1 parts over replicas, not 2" in found["optimizer parallel"]
    )


@pytest.mark.compiles("all")
def test_accumulators_that_are_not_sharded(compiled):
    sharded = {"parallel_optimizer_config": {"gradient_accumulation_shard": True, "parallel_optimizer_threshold": 0}}
    found = violated(asked(compiled("all"), "all", parallel=sharded))
    weight = "accu_grads.model.layers.1.attention.wq.weight"
    assert f"rank 6: {weight} has shape [32, 64], not [16, 64]" in found["optimizer parallel"]


@pytest.mark.compiles("full")
def test_recomputation_shifted_by_a_layer(compiled):
    """The marks of the first layer are on the second one."""

    def other_layer(node: Node) -> str:
        return re.sub(r"(?<=layers-CellList/)[01]", lambda digit: "10"[int(digit.group())], node.scope)

    graph = compiled("full")
    functions = tuple(
        replace(function, nodes=tuple(replace(node, scope=other_layer(node)) for node in function.nodes))
        for function in graph.functions
    )
    found = violated(asked(replace(graph, functions=functions), "full"))
    assert list(found) == ["recomputation"]
    told = found["recomputation"]
    assert {"rank 0: layer 0 is not recomputed", "rank 0: layer 1 is recomputed, which nobody asked for"} <= {*told}
    others = [one for one in told if "recomputed" not in one]
    assert all(
        re.match(r"rank 0: layer (0 does not repeat|1 repeats) the communication beside ", one) for one in others
    )


@pytest.mark.compiles("select", "full without silu")
def test_operators_that_are_selected_or_excluded_otherwise(compiled):
    silu = [r"feed_forward\.w1\.activation\.silu"]
    only = violated(asked(compiled("select"), "select", recompute_config={"select_recompute": {silu[0]: [1]}}))
    assert only == {"recomputation": ("rank 0: layer 0 recomputes feed_forward.mul, which nobody asked for",)}
    more = {"select_recompute": {silu[0]: [2], r"feed_forward\.mul": [1]}}
    missing = violated(asked(compiled("select"), "select", recompute_config=more))
    assert missing == {"recomputation": (rf"rank 0: layer 1 does not recompute '{silu[0]}'",)}
    excluded = asked(
        compiled("full without silu"), "full without silu", recompute_config={"select_recompute_exclude": silu}
    )
    assert violated(excluded)["recomputation"][0] == "rank 0: layer 0 does not recompute feed_forward.mul"


@pytest.mark.compiles("select")
def test_what_makes_a_matrix_of_codes_is_always_repeated(compiled):
    """The same operator, selected by nobody, is no mistake inside the cell that holds codes."""

    def is_quantized(node: Node) -> str:
        return node.scope.replace("feed_forward-FeedForward/", "feed_forward-FeedForward/held-DequantizedWeight/")

    graph = compiled("select")
    functions = tuple(
        replace(
            function,
            nodes=tuple(
                replace(node, scope=is_quantized(node)) if node.instance == "mul" else node for node in function.nodes
            ),
        )
        for function in graph.functions
    )
    silu = r"feed_forward\.w1\.activation\.silu"
    found = asked(replace(graph, functions=functions), "select", recompute_config={"select_recompute": {silu: [1]}})
    assert violated(found) == {}


@pytest.mark.compiles(ALL)
def test_chunks_that_are_placed_otherwise(compiled):
    found = violated(
        asked(compiled(ALL), ALL, model={"num_layers": 6, "pp_interleave_num": 2, "offset": [[0, 1], [1, 0]]})
    )
    assert "rank 5: stage 1 holds layers 2, 4-5, the plan has 1-2, 5 there" in found["layers by stage"]
    assert found["chunks by stage"] == ("rank 5: stage 1 runs layers 2 then 4-5, the plan has 1-2 then 5",)


@pytest.mark.compiles("all")
def test_another_number_of_micro_batches(compiled):
    found = violated(asked(compiled("all"), "all", micro=4))
    assert found["parts of a batch"] == ("rank 6: layer 1 runs 2 times in a step, not 4",)


@pytest.mark.compiles("dp2")
def test_gradients_that_ranks_send_in_different_messages(compiled):
    weight = "model.layers.0.attention.wq.weight"
    graph = compiled("dp2")
    exchange = next(n for n in graph.find("AllReduce") if n.primal.get("mirror_user_id") == weight)
    moved = changed(graph, lambda node: node == exchange, attributes={**exchange.attributes, "fusion": 3})
    config = cluster_run(**CASES["dp2"][1])
    assert not violated({f.what: f for f in findings(config, [graph, replace(graph, rank=0)])})
    found = violated({f.what: f for f in findings(config, [graph, replace(moved, rank=0)])})
    assert found == {
        "gradient fusion": (
            f"ranks 0-1: the gradient of {weight} is in different messages on ranks 0-1",
            f"rank 0: the gradient of {weight} is in message 3, not 1",
        )
    }


@pytest.mark.compiles("tp2")
def test_sequence_parallel_that_was_dropped(compiled):
    found = violated(asked(compiled("tp2"), "tp2", use_seq_parallel=True))
    norm = "rank 0: model.layers.0.attention_norm.norm is sharded ((1, 1), (1,)), not ((2, 1), (1,))"
    assert norm in found["shardings"]


@pytest.mark.compiles("tp2")
def test_another_size_of_tensor_parallelism(compiled):
    found = violated(asked(compiled("tp2"), "tp2", tp=1, dp=2))
    assert "shardings" in found


@pytest.mark.compiles("all", "composed")
@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("all", "compute_dtype", "bfloat16", "MatMul of model.layers.*.attention.wq is in float16, not in bfloat16"),
        (
            "all",
            "layernorm_compute_type",
            "float16",
            "RmsNorm of model.layers.*.ffn_norm is in float32, not in float16",
        ),
        ("all", "rotary_dtype", "float16", "Add of model.layers.*.attention.rotary is in float32, not in float16"),
        ("all", "fp32_residual_connection", True, "Add of model.layers.* is in float16, not in float32"),
        ("all", "fp32_residual_connection", True, "Receive of the pipeline is in float16, not in float32"),
        ("composed", "softmax_compute_type", "float16", "Softmax of model.layers.*.attention.attention is in float32"),
    ],
)
def test_a_dtype_that_is_another_one_is_found(compiled, name, key, value, said):
    found = violated(asked(compiled(name), name, model={key: value}))
    assert list(found) == ["dtypes"]
    assert said in "\n".join(found["dtypes"])


@pytest.mark.compiles("all")
@pytest.mark.parametrize("kind", ["", "adam_v.", "accu_grads."])
def test_a_weight_or_its_state_in_half_precision_is_found(compiled, kind):
    graph = compiled("all")
    name = next(
        name for name in graph.parameters if re.fullmatch(rf"{re.escape(kind)}model\.layers\.1\..*wq\.weight", name)
    )
    parameters = {**graph.parameters, name: replace(graph.parameters[name], dtype="float16")}
    (problem,) = asked(replace(graph, parameters=parameters), "all")["dtypes"].problems
    assert problem == f"rank 6: {name} is in float16, not in float32"
