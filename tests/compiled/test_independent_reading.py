"""Mistakes in what builds a model on its devices: graphs are held against the YAML's own numbers, not against what built them."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_cluster import cluster_run
from test_asked_for import ALL, asked, changed, violated

from mindllm import verify
from mindllm.compiled.conformance import expected, planned
from mindllm.compiled.conformance.expected import (
    asked_plan,
    exchanged_with_experts,
    gathered_elements,
    part_of_weight,
    rows_of_rank,
)
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.config import load_config
from mindllm.parallel import layer_plan, sharding
from mindllm.parallel.layer_plan import make_plan

FORMS = sorted((Path(verify.__file__).parent / "forms").glob("*.yaml"))
SEQUENCE = {"use_seq_parallel": True}
ATTENTION = "attention.attention.flash_attention"


def test_the_reading_asks_nothing_that_builds_a_model():
    tree = ast.parse(Path(expected.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name for name in imported if name.startswith("mindllm")} == {"mindllm.config", "mindllm.config.recompute"}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_the_reading_and_the_plan_agree(form):
    config = load_config(form)
    plan, reading = make_plan(config), asked_plan(config)
    assert (reading.stages, reading.chunks) == (plan.stages, plan.chunks)
    for wanted, has in zip(reading.layers, plan.layers, strict=True):
        assert (wanted.stage, wanted.chunk, wanted.recompute) == (has.stage, has.chunk, has.recompute)
        patterns = {key: set(names) for key, names in wanted.patterns.items() if names}
        assert patterns == {key: set(names) for key, names in has.patterns.items()}


def test_layers_and_counts_are_read_as_mindformers_does(tmp_path):
    run = tmp_path / "run.yaml"
    base = (FORMS[0].parent / "base" / "form.yaml").read_text(encoding="utf-8")
    run.write_text(
        base.replace("num_layers: 2", "num_layers: 8\n    pp_interleave_num: 2\n    offset: [[1, 0], [-1, 0]]").replace(
            "context:",
            "recompute_config: {recompute: [3, 1]}\nparallel_config: {pipeline_stage: 2, micro_batch_num: 4}\ncontext:",
        )
    )
    config = load_config(run, {"parallel.pipeline_config.pipeline_interleave": True})
    layers = asked_plan(config).layers
    assert [(layer.chunk, layer.stage) for layer in layers] == [
        *[(0, 0)] * 3,
        *[(0, 1)] * 2,
        (1, 0),
        *[(1, 1)] * 2,
    ]
    # three of stage 0, one of each of its chunks in turn: two of the first, one of the second
    assert [layer.recompute for layer in layers] == [True, True, False, True, False, True, False, False]


def test_a_plan_that_turns_offsets_round(monkeypatch):
    config = load_config(next(form for form in FORMS if form.stem == "uneven_stages"))
    whole = layer_plan.layer_counts
    assert planned(config).problems == ()
    turned = lambda *sizes: tuple(row[::-1] for row in whole(*sizes))  # noqa: E731
    monkeypatch.setattr(layer_plan, "layer_counts", turned)
    assert planned(config).problems[0] == (
        r"layer 1 is planned on stage 1, chunk 0, recomputed, the YAML has it on stage 0, chunk 0, recomputed"
    )


@pytest.mark.compiles("tp2")
def test_sequence_parallelism_that_the_table_forgets(compiled, monkeypatch):
    whole = sharding.sharding_table

    def forgetful(lm, parallel):
        return whole(lm, parallel.model_copy(update={"use_seq_parallel": False}))

    monkeypatch.setattr(sharding, "sharding_table", forgetful)
    found = violated(asked(compiled("tp2"), "tp2", **SEQUENCE))
    assert set(found) == {"sizes"}
    assert "rank 0: model.layers.0.attention_norm is of 64 rows, not 32" in found["sizes"]
    behind = "behind model.layers.0.feed_forward.w2 stands AllReduce of [64, 64], not ReduceScatter of [32, 64]"
    assert f"rank 0: {behind}" in found["sizes"]


def again(graph: CompiledGraph, where) -> CompiledGraph:
    """A graph with the nodes that ``where`` is true of twice, one for nobody."""
    assert any(map(where, graph.nodes()))
    functions = tuple(
        replace(
            one,
            nodes=tuple(
                new
                for node in one.nodes
                for new in ([replace(node, name=f"{node.name}_again"), node] if where(node) else [node])
            ),
        )
        for one in graph.functions
    )
    return replace(graph, functions=functions)


@pytest.mark.compiles("tp2 sequence")
def test_hidden_states_that_are_gathered_for_each_projection(compiled):
    """It changes no number: the exchange is made twice."""
    graph = compiled("tp2 sequence")
    assert violated(asked(graph, "tp2 sequence")) == {}
    gathers = lambda node: node.op == "AllGather" and "layers.1.attention.w" in node.path and not node.backward  # noqa: E731
    text = "before the products of attention in layer 1 8192 elements are gathered in a step, not 4096"
    assert violated(asked(again(graph, gathers), "tp2 sequence")) == {"sizes": (f"rank 1: {text}",)}


@pytest.mark.slow
@pytest.mark.compiles("experts")
def test_tokens_that_are_exchanged_with_experts_twice(compiled):
    graph = compiled("experts")
    assert violated(asked(graph, "experts")) == {}
    sent = lambda node: node.op == "AlltoAll" and "layers.0.feed_forward" in node.path and not node.backward  # noqa: E731
    text = "layer 0 exchanges 32768 elements with its experts in a step, not 16384"
    assert violated(asked(again(graph, sent), "experts")) == {"sizes": (f"rank 0: {text}",)}
    smaller = asked(graph, "experts", model={"capacity_factor": 0.5})
    assert "layer 1 exchanges 16384 elements with its experts in a step, not 8192" in violated(smaller)["sizes"][1]


@pytest.mark.compiles("split vocabulary")
def test_a_vocabulary_that_the_table_splits_unasked(compiled, monkeypatch):
    whole = sharding.sharding_table
    split = lambda lm, parallel: whole(lm, parallel.model_copy(update={"vocab_emb_dp": False}))  # noqa: E731
    monkeypatch.setattr(sharding, "sharding_table", split)
    found = violated(asked(compiled("split vocabulary"), "split vocabulary", vocab_emb_dp=True))
    table = "model.tok_embeddings.embedding_weight is cut to [64, 64], not to [128, 64]"
    assert found == {"sizes": (f"rank 0: {table}",)}


@pytest.mark.compiles("tp2")
@pytest.mark.parametrize("weight", ["feed_forward.w1", "attention.wo", "attention_norm"])
def test_a_weight_that_is_cut_otherwise(compiled, weight):
    graph, name = compiled("tp2"), f"model.layers.1.{weight}.weight"
    parameter = graph.parameters[name]
    assert parameter.layout is not None
    rows, *others = parameter.layout.full_shape
    cut = replace(parameter.layout, slice_shape=(rows // 4, *others))
    parameters = {**graph.parameters, name: replace(parameter, layout=cut)}
    found = violated(asked(replace(graph, parameters=parameters), "tp2"))["sizes"]
    assert len(found) == 1
    assert found[0].startswith(f"rank 0: {name} is cut to ")


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("attention.wq.lora_a", (8, 64), (8, 64)),
        ("attention.wq.lora_b", (64, 8), (32, 8)),
        ("attention.wq.lora_magnitude", (64,), (32,)),
        ("attention.wo.lora_a", (8, 64), (8, 32)),
        ("attention.wo.lora_b", (64, 8), (64, 8)),
        ("attention.wkv_down.lora_b", (24, 8), (24, 8)),
        ("feed_forward.w1.codes", (96, 4, 8), (48, 4, 8)),
        ("feed_forward.w2.scales", (64, 6), (64, 3)),
        ("feed_forward.w1.lora_e", (8,), (8,)),
        ("attention.alibi_bias", (1, 4, 1, 32), None),
    ],
)
def test_parts_of_adapters_and_codes_are_those_of_their_projection(name, shape, part):
    assert part_of_weight(cluster_run(dp=2, tp=2), f"model.layers.0.{name}", shape) == part


@pytest.mark.compiles("tp2 sequence")
def test_hidden_states_that_are_gathered_where_nobody_needs_them(compiled):
    graph = compiled("tp2 sequence")
    gathers = lambda node: node.op == "AllGather" and "layers.1.attention.w" in node.path and not node.backward  # noqa: E731
    scope = next(node.scope for node in graph.nodes() if gathers(node))
    elsewhere = re.sub(r"w[qkv]-Linear", "rotary-RotaryEmbedding", scope)
    functions = tuple(
        replace(one, nodes=tuple(replace(node, scope=elsewhere) if gathers(node) else node for node in one.nodes))
        for one in graph.functions
    )
    found = violated(asked(replace(graph, functions=functions), "tp2 sequence"))["sizes"]
    place = "attention.rotary of layer 1, where nothing is to be exchanged"
    assert f"rank 1: AllGather of [64, 64] stands at {place}" in found


@pytest.mark.compiles("all")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"runner_config": {"batch_size": 4}}, "Receive is of [32, 64], not of 64 rows"),
        ({"model": {"loss_chunks": 2}}, "lm_head is of 64 rows, not 32"),
    ],
)
def test_rows_of_messages_and_logits(compiled, changes, text):
    assert f"rank 6: {text}" in violated(asked(compiled("all"), "all", **changes))["sizes"]


@pytest.mark.compiles("dp2")
def test_groups_of_layers_that_share_a_message_otherwise(compiled):
    found = violated(asked(compiled("dp2"), "dp2", gradient_aggregation_group=1))
    assert "rank 1: the gradient of lm_head.weight is in message 4, not 1" in found["gradient fusion"]


@pytest.mark.compiles("full")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"mp_comm_recompute": False},
            "layer 0 repeats the communication beside attention.attention.flash_attention, ",
        ),
        (
            {"select_comm_recompute_exclude": [r"ffn_norm\.norm"]},
            "layer 0 repeats the communication beside ffn_norm.norm, which nobody asked for",
        ),
        ({"recompute_slice_activation": True}, "layer 0 does not repeat the slice of attention.attention."),
    ],
)
def test_communication_that_is_repeated_otherwise(compiled, options, text):
    found = violated(asked(compiled("full"), "full", recompute_config={"recompute": [1], **options}))
    assert set(found) == {"recomputation"}
    assert found["recomputation"][0].startswith(f"rank 0: {text}")


def moving(graph: CompiledGraph, layer: int, ahead: int) -> CompiledGraph:
    """A graph whose fused attention in one layer is marked to wait on the host, and its results are moved."""

    def is_attention(node: Node) -> bool:
        return node.op == "FlashAttentionScore" and f".layers.{layer}." in node.path and not node.backward

    score = next(node for node in graph.nodes() if is_attention(node))
    marked = changed(graph, is_attention, attributes={**score.attributes, "offload": True, "backward_prefetch": ahead})
    moved = Node("MoveTo", f"{score.name}_moved", (score.name,), score.type, score.scope, {})
    functions = tuple(
        replace(one, nodes=(*one.nodes, moved)) if any(map(is_attention, one.nodes)) else one
        for one in marked.functions
    )
    return replace(marked, functions=functions)


@pytest.mark.compiles(ALL)
def test_results_that_wait_on_the_host_in_another_layer(compiled):
    swap = {"swap": True, "op_swap": [{"op_name": r"attention\.attention\.flash_attention", "layers": [5]}]}
    graph = compiled(ALL)
    wanted = lambda graph: violated(asked(graph, ALL, swap_config=swap))  # noqa: E731
    assert wanted(moving(graph, 5, ahead=1)) == {}
    assert wanted(graph) == {"swap": (f"rank 5: layer 5 keeps {ATTENTION} on the device",)}
    assert wanted(moving(graph, 2, ahead=1))["swap"][0] == (
        f"rank 5: layer 2 moves {ATTENTION}, which nobody asked for"
    )
    late = f"rank 5: layer 5 has {ATTENTION} back 3 operators ahead, not 1"
    assert wanted(moving(graph, 5, ahead=3)) == {"swap": (late,)}
    unmoved = replace(
        moving(graph, 5, ahead=1),
        functions=tuple(
            replace(one, nodes=tuple(node for node in one.nodes if node.op != "MoveTo"))
            for one in moving(graph, 5, ahead=1).functions
        ),
    )
    assert wanted(unmoved) == {"swap": ("rank 5: layer 5 has 0 results moved, and 1 operators marked",)}


def test_what_a_rank_has_by_the_numbers_of_the_yaml():
    """Sizes worked out by hand: two data-parallel ranks, two tensor-parallel ones, sequence parallel."""
    from conftest import CASES
    from small_cluster import cluster_run

    config = cluster_run(**CASES["all"][1])
    assert (rows_of_rank(config).inside, rows_of_rank(config).between) == (64, 32)
    assert part_of_weight(config, "model.layers.1.feed_forward.w2.weight", (64, 96)) == (64, 48)
    assert part_of_weight(config, "model.layers.1.ffn_norm.weight", (64,)) == (64,)
    assert part_of_weight(config, "model.layers.1.attention.wk.bias", (32,)) == (16,)
    assert gathered_elements(config) == 64 * 64
    experts = cluster_run(**CASES["experts"][1])
    assert gathered_elements(experts) == 0
    assert exchanged_with_experts(experts) == 2 * 4 * 16 * 64  # sequences, experts, places, channels


@pytest.mark.compiles("tp2 sequence")
def test_rows_that_are_not_taken_in_parts(compiled):
    found = violated(asked(compiled("tp2 sequence"), "tp2 sequence", model={"fine_grain_interleave": 2}))["sizes"]
    assert "rank 1: model.layers.1.feed_forward.w2 is of 64 rows, not 32" in found
