"""What the real parallel compiler inserts for the declared shardings: exactly the expected exchanges, and no others."""

from __future__ import annotations

import re
from collections import Counter

import pytest

WEIGHTS_OF_A_LAYER = 9  # two norms, q, k, v, o, gate, up, down
WEIGHTS = 2 * WEIGHTS_OF_A_LAYER + 3  # two layers, embedding, final norm, head


def part(node):
    """The path from the model on, without the wrappers around it: ``layers.0.attention.wo``."""
    found = re.search(
        r"(layers\.\d.*|tok_embeddings.*|norm_out.*|lm_head.*|cross_entropy.*|global_norm|tokens)", node.path
    )
    return found.group(1) if found else ""


def forward(graph):
    """Exchanges of the forward pass, by operator and place."""
    return Counter((node.op, part(node)) for node in graph.collectives() if not node.backward)


def backward(graph, op):
    return [node for node in graph.collectives() if node.backward and node.op == op]


CROSS_ENTROPY = {("AllReduce", "cross_entropy"): 3}  # largest logit, normaliser, logit of the label
NORM = {("AllReduce", "global_norm"): 1}


@pytest.mark.compiles("tp2")
def test_tensor_parallel_adds_two_partial_sums_per_layer(compiled):
    graph = compiled("tp2")
    layers = {("AllReduce", f"layers.{i}.{place}"): 1 for i in (0, 1) for place in ("attention.wo", "feed_forward.w2")}
    assert forward(graph) == Counter({**layers, **CROSS_ENTROPY, **NORM})
    assert all(node.ranks == (0, 1) for node in graph.collectives())
    activations = [node for node in backward(graph, "AllReduce") if node.shapes == ((64, 64),)]
    assert len(activations) == 2 * 2


@pytest.mark.compiles("tp2 sequence")
def test_sequence_parallel_gathers_once_for_q_k_and_v_and_scatters_sums(compiled):
    graph = compiled("tp2 sequence")
    places = [f"layers.{i}.{part}" for i in (0, 1) for part in ("attention", "feed_forward")]
    gathers = Counter(re.sub(r"\.w\w$", "", part(node)) for node in graph.find("AllGather", lambda n: not n.backward))
    assert gathers == Counter([*places, "lm_head"])
    scatters = [part(node) for node in graph.find("ReduceScatter", lambda n: not n.backward)]
    assert scatters == [f"layers.{i}.{place}" for i in (0, 1) for place in ("attention.wo", "feed_forward.w2")]
    sums = {key: count for key, count in forward(graph).items() if key[0] == "AllReduce"}
    assert sums == {**CROSS_ENTROPY, **NORM}
    assert [node.shapes for node in graph.find("RmsNorm")] == [((32, 64), (32, 1))] * 5  # half of the 64 tokens
    # Backward the roles swap, and the incoming gradient is gathered again for each weight's product.
    assert len(backward(graph, "ReduceScatter")) == len(backward(graph, "AllGather")) + 1 == 5


@pytest.mark.compiles("dp2")
def test_data_parallel_adds_every_gradient_and_the_loss(compiled):
    graph = compiled("dp2")
    assert forward(graph) == Counter({("AllReduce", ""): 1, **NORM})  # the loss, the norm
    mirrors = [node for node in backward(graph, "AllReduce") if "Grad__Mirror" in node.path]
    assert len(mirrors) == WEIGHTS
    assert all(node.attributes["op"] == "sum" for node in mirrors)


@pytest.mark.compiles("dp2 tp2")
def test_optimizer_parallel_gathers_weights_and_scatters_gradients(compiled):
    graph = compiled("dp2 tp2")
    weights = [node for node in graph.find("AllGather") if "mirror_user_id" in node.primal]
    gradients = [node for node in backward(graph, "ReduceScatter") if "mirror_user_id" in node.primal]
    assert len(weights) == len(gradients) == WEIGHTS
    assert not [node for node in backward(graph, "AllReduce") if "Grad__Mirror" in node.path]
    groups = {node.primal["mirror_user_id"]: node.ranks for node in weights}
    assert groups["model.layers.0.attention.wq.weight"] == (1, 3)  # rank 3: slices over its data-parallel neighbours
    assert groups["model.layers.0.attention_norm.weight"] == (0, 1, 2, 3)  # not split by tensor parallel: over all
    assert graph.parameters["model.layers.0.attention.wq.weight"].shape == (16, 64)
    assert graph.parameters["adam_m.model.layers.0.attention.wq.weight"].shape == (16, 64)
    tokens = {node.ranks for node in graph.find("AllGather", lambda n: "mirror_user_id" not in n.primal)}
    assert tokens == {(2, 3)}


@pytest.mark.compiles("tp2", "dp2", "dp2 tp2", "all")
def test_the_norm_of_split_gradients_is_added_over_devices(compiled):
    split_by_tensor = 2 * 7 + 1  # projections of two layers and the head
    for name, group, copies in (
        ("tp2", [(0, 1)], WEIGHTS - split_by_tensor),
        ("dp2", [(0, 1)], WEIGHTS),
        ("dp2 tp2", [(0, 1, 2, 3)], 0),
        ("all", [(4, 5, 6, 7), (2, 6)], 0),
    ):
        graph = compiled(name)
        sums = graph.find("AllReduce", lambda n: part(n) == "global_norm")
        assert [node.ranks for node in sums] == group
        # Whole gradients lie on every rank and are divided by their number before the sum.
        assert len(graph.find("RealDiv", lambda n: part(n) == "global_norm")) == copies


@pytest.mark.compiles("split vocabulary", "dp2 tp2")
def test_a_split_vocabulary_scatters_the_sum_of_its_lookups(compiled):
    graph = compiled("split vocabulary")
    assert forward(graph)["ReduceScatter", "tok_embeddings"] == 1
    assert graph.parameters["model.tok_embeddings.embedding_weight"].shape == (64, 64)
    assert forward(compiled("dp2 tp2"))["ReduceScatter", "tok_embeddings"] == 0


@pytest.mark.compiles("dp2 tp2", "composed")
def test_attention_works_on_its_own_heads(compiled):
    flash = compiled("dp2 tp2").find("FlashAttentionScore")
    assert [node.shapes[3] for node in flash] == [(2, 2, 32, 16)] * 2  # [batch / dp, heads / tp, seq, head_dim]
    scores = compiled("composed").find("BatchMatMul", lambda n: not n.backward)
    assert [node.shapes for node in scores] == [((2, 1, 64, 32),), ((2, 1, 64, 16),)] * 2  # one key head each
    for name in ("dp2 tp2", "composed"):
        assert not [node for node in compiled(name).collectives() if ".attention.attention" in node.path]


@pytest.mark.compiles("composed", "split vocabulary")
def test_the_composed_model_exchanges_what_the_fused_one_does(compiled):
    def without_embedding(name):
        return Counter({key: n for key, n in forward(compiled(name)).items() if key[1] != "tok_embeddings"})

    assert without_embedding("composed") == without_embedding("split vocabulary")


@pytest.mark.compiles("dp2 slices", "dp2")
def test_sliced_inputs_count_tokens_over_ranks(compiled):
    assert forward(compiled("dp2 slices"))["AllReduce", "tokens"] == 1
    assert forward(compiled("dp2"))["AllReduce", "tokens"] == 0


@pytest.mark.compiles("dp2 optimizer level 3")
def test_weights_can_be_gathered_again_for_the_backward_pass(compiled):
    gathers = compiled("dp2 optimizer level 3").find("AllGather")
    weight = "model.layers.1.attention.wo.weight"
    assert [n.recomputed for n in gathers if n.attributes["mirror_user_id"] == weight] == [False, True]


@pytest.mark.compiles("dp2 accumulating", "all", "pp2 first")
def test_accumulators_are_cleared_without_constants(compiled):
    for name in ("dp2 accumulating", "all", "pp2 first"):
        graph = compiled(name)
        accumulators = [key for key in graph.parameters if key.startswith("accu_grads.")]
        assert accumulators
        assert len(graph.find("ZerosLikeExt")) == len(accumulators)
        written = [node.inputs[0].rsplit(":", 1)[-1] for node in graph.find("Assign")]
        assert set(accumulators) <= set(written)


@pytest.mark.compiles("dp2 accumulating", "dp2 accumulating, optimizer")
def test_accumulated_gradients_are_exchanged_once(compiled):
    graph = compiled("dp2 accumulating")
    assert len([node for node in backward(graph, "AllReduce") if "Grad__Mirror" in node.path]) == WEIGHTS
    assert len(graph.find("FlashAttentionScore")) == 2  # two layers; both parts share them
    sharded = compiled("dp2 accumulating, optimizer")
    assert len(backward(sharded, "ReduceScatter")) == WEIGHTS
    assert len(sharded.find("FlashAttentionScore")) == 2 * 2


@pytest.mark.compiles("tied tp2")
def test_a_whole_tied_head_splits_tokens_over_all_devices(compiled):
    graph = compiled("tied tp2")
    products = graph.find("MatMul", lambda n: n.path.endswith("lm_head") and not n.backward and not n.recomputed)
    assert [node.shapes for node in products] == [((16, 128),)] * 2  # two chunks: a quarter of 64 tokens, all 128 words
    assert {key: n for key, n in forward(graph).items() if key[1] == "cross_entropy"} == {}
    assert graph.parameters["model.tok_embeddings.embedding_weight"].shape == (128, 64)


@pytest.mark.compiles("dp4 shared optimizer state")
def test_replicas_that_share_optimizer_state_count_their_copies(compiled):
    """Two pairs of ranks hold the same parts, so the sum of squares over all ranks is twice the norm's."""
    graph = compiled("dp4 shared optimizer state")
    divisions = graph.find("RealDiv", lambda node: part(node) == "global_norm")
    assert len(divisions) == WEIGHTS
    assert {float(graph.constants[node.inputs[1]]) for node in divisions} == {2.0}
