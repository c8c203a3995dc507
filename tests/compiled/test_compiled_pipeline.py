"""Stages as the real compiler cuts them: what is sent, and what each rank holds."""

import pytest

LAST, FIRST = "pp2 last", "pp2 first"


def exchanges(graph):
    """Numbers of (sent, received) tensors in the forward and in the backward pass."""
    return tuple(
        tuple(len(graph.find(op, lambda node, way=way: node.backward == way)) for op in ("Send", "Receive"))
        for way in (False, True)
    )


@pytest.mark.compiles(FIRST, LAST)
def test_every_micro_batch_is_sent_once_each_way(compiled):
    assert exchanges(compiled(FIRST)) == ((4, 0), (0, 4))
    assert exchanges(compiled(LAST)) == ((0, 4), (4, 0))
    for name in (FIRST, LAST):
        moved = [node for node in compiled(name).collectives() if node.op in ("Send", "Receive")]
        assert {node.ranks for node in moved} == {(0, 1)}
        assert {node.shapes for node in moved} == {((64, 64),)}  # the tokens of one micro batch
    tags = [node.attributes["sr_tag"] for node in compiled(FIRST).find("Send")]
    assert len(set(tags)) == 4


@pytest.mark.compiles(FIRST, LAST)
def test_a_stage_holds_its_own_weights_and_their_state_only(compiled):
    held = {name: {key.split(".layers.")[-1] for key in compiled(name).parameters} for name in (FIRST, LAST)}
    weights = {
        name: {key for key in keys if not key.startswith(("adam_", "accu_grads"))} for name, keys in held.items()
    }
    assert "0.attention.wq.weight" in weights[FIRST]
    assert not {key for key in weights[FIRST] if key.startswith("1.") or "lm_head" in key or "norm_out" in key}
    assert "1.attention.wq.weight" in weights[LAST]
    assert not {key for key in weights[LAST] if key.startswith("0.") or "embed" in key}
    for name in (FIRST, LAST):
        parameters = compiled(name).parameters
        trained = [key for key in parameters if f"adam_m.{key}" in parameters]
        assert all(f"accu_grads.{key}" in parameters and f"adam_v.{key}" in parameters for key in trained)
        assert len([key for key in parameters if key.startswith("adam_m.")]) == len(trained)


@pytest.mark.compiles(FIRST, LAST)
def test_tables_are_copied_to_stages_and_never_sent(compiled):
    for name in (FIRST, LAST):
        tables = [key for key in compiled(name).parameters if "rotary" in key or "mask" in key]
        assert len(tables) == 3


@pytest.mark.compiles("interleaved first")
def test_chunks_pass_every_micro_batch_around(compiled):
    """Stage 0 holds layers 0 and 2: it sends both to stage 1 and receives the input of the second."""
    graph = compiled("interleaved first")
    assert exchanges(graph) == ((8, 4), (4, 8))
    held = {key.split(".")[2] for key in graph.parameters if key.startswith("model.layers.")}
    assert held == {"0", "2"}


@pytest.mark.compiles("v first", "v last")
def test_the_second_chunk_of_a_v_runs_back(compiled):
    """Stage 0 holds layers 0 and 3, stage 1 those between, which follow each other there: nothing is sent from 1 to 1."""
    first, last = compiled("v first"), compiled("v last")
    assert exchanges(first) == exchanges(last) == ((5, 5), (5, 5))
    held = [
        {key.split(".")[2] for key in graph.parameters if key.startswith("model.layers.")} for graph in (first, last)
    ]
    assert held == [{"0", "3"}, {"1", "2"}]
    ends = {"model.tok_embeddings.embedding_weight", "model.norm_out.weight", "lm_head.weight"}
    assert ends < set(first.parameters)
    assert not ends & set(last.parameters)


@pytest.mark.compiles("tied first", "tied last")
def test_a_tied_embedding_is_sent_and_its_gradient_returned(compiled):
    first, last = compiled("tied first"), compiled("tied last")
    assert exchanges(first) == ((2 + 1, 0), (0, 2 + 1))
    assert exchanges(last) == ((0, 2 + 1), (2 + 1, 0))
    weight = "model.tok_embeddings.embedding_weight"
    assert f"adam_m.{weight}" in first.parameters
    assert f"adam_m.{weight}" not in last.parameters


@pytest.mark.compiles("tied between", FIRST)
def test_a_stage_between_those_of_a_tied_embedding_gives_back_all_four(compiled):
    """It has no gradient of the embedding: what would read one took an output of the step with it."""
    between = compiled("tied between")
    assert not [key for key in between.parameters if "embed" in key]
    for graph in (between, compiled(FIRST)):
        loss, norm, finite, tokens = graph.types[graph.step.output].items
        assert [found.dtype for found in (loss, norm, finite, tokens)] == ["float32", "float32", "bool", "float32"]


@pytest.mark.compiles("all")
def test_the_network_is_compiled_once_for_all_micro_batches(compiled):
    graph = compiled("all")
    assert len(graph.find("FlashAttentionScore")) == 1
    once_a_step = [node.op for node in graph.functions[0].nodes]
    assert (
        once_a_step.count("AllGather") == once_a_step.count("ReduceScatter") == 9 + 2
    )  # weights of a layer, norm, head


@pytest.mark.compiles("interleaved all")
def test_uneven_chunks_with_sequence_and_optimizer_parallel_and_recomputation(compiled):
    """Stage 1 holds layer 2 in its first chunk, and in its second layers 4, fully recomputed, and 5."""
    graph = compiled("interleaved all")
    assert {key.split(".")[2] for key in graph.parameters if key.startswith("model.layers.")} == {"2", "4", "5"}
    assert exchanges(graph) == ((4, 8), (8, 4))
    repeated = {
        n: {node.op for node in graph.nodes() if node.recomputed and f".layers.{n}." in node.path} for n in (2, 4, 5)
    }
    assert repeated[2] == repeated[5] == {"SiLU", "Mul", "AllGather"}
    assert {"MatMul", "FlashAttentionScore", "RmsNorm"} < repeated[4]
    norms = graph.find("RmsNorm", lambda node: node.path.endswith("2.ffn_norm"))
    assert [node.shapes for node in norms] == [((32, 64), (32, 1))]  # half of 64 tokens
    gathered = [node for node in graph.find("AllGather") if node.ranks == (5, 7)]
    assert len(gathered) == 3 * 7 + 1  # projections of three layers and the head, over data parallel
