"""Operations and bytes by operator, against the analytic count of a whole step."""

from dataclasses import replace

import pytest

from mindllm.compiled.graph.cost import Cost, _share_of_band, cost, step_cost, uncounted

TOKENS, HIDDEN, WIDTH, VOCABULARY, LAYERS = 64, 64, 96, 128, 2
ATTENTION_WEIGHTS = HIDDEN * (HIDDEN + 2 * HIDDEN // 2 + HIDDEN)  # two of four heads for keys and values
WEIGHTS = LAYERS * (ATTENTION_WEIGHTS + 3 * HIDDEN * WIDTH) + HIDDEN * VOCABULARY
SEQUENCE, SEQUENCES = 32, 2
ATTENTION = LAYERS * SEQUENCES * 4 * SEQUENCE**2 * HIDDEN / 2  # forward, causal


@pytest.mark.compiles("tp2", "one device", "all")
def test_a_step_takes_three_times_the_forward_products(compiled):
    """Forward 2 operations a weight and token, backward twice that: the split over two devices halves it."""
    total = step_cost(compiled("tp2"))
    assert total.products == 3 * 2 * WEIGHTS * TOKENS / 2 + 3.5 * ATTENTION / 2
    assert total.flops > total.products
    once_more = LAYERS / 2 * (ATTENTION_WEIGHTS + 2 * HIDDEN * WIDTH) * 2 * TOKENS + ATTENTION / LAYERS
    assert step_cost(compiled("one device")).products == 2 * total.products + once_more  # layer 0 but its last product


@pytest.mark.compiles("all")
def test_operators_of_a_reused_network_count_for_every_micro_batch(compiled):
    graph = compiled("all")
    flash = graph.find("FlashAttentionScore")
    assert len(flash) == 1
    assert step_cost(graph, flash) == cost(graph, flash[0]) * 2


@pytest.mark.compiles("tp2")
def test_bytes_are_those_of_inputs_and_outputs(compiled):
    graph = compiled("tp2")
    half = 2
    product = graph.find("MatMul", lambda node: node.path.endswith("layers.0.feed_forward.w1") and not node.backward)[0]
    assert cost(graph, product).bytes == half * (TOKENS * HIDDEN + WIDTH // 2 * HIDDEN + TOKENS * WIDTH // 2)
    assert all(cost(graph, node) == Cost() for node in graph.find("Reshape") + graph.find("Depend"))


@pytest.mark.compiles("tp2", "all")
def test_operators_whose_cost_is_not_known_are_named(compiled):
    graph = compiled("tp2")
    assert uncounted(graph) == ()
    assert uncounted(compiled("all")) == ()
    function = graph.functions[0]
    strange = replace(function.nodes[0], name="strange", op="Erfinv")
    changed = replace(graph, functions=(replace(function, nodes=(*function.nodes, strange)), *graph.functions[1:]))
    assert uncounted(changed) == ("Erfinv",)


@pytest.mark.parametrize(
    ("queries", "keys", "before", "after", "pairs"),
    [
        (8, 8, 8, 0, 32),  # a causal triangle, half of its diagonal
        (4, 8, 8, 0, 4 * 6),  # its last queries
        (4, 8, 12, -4, 4 * 2),  # the first ones
        (8, 8, 2, 0, 14),  # each sees itself and two before, the outermost ones half
        (4, 8, 4, 8, 4 * 6),  # those that stand in reverse
    ],
)
def test_of_a_band_as_much_is_counted_as_is_in_it(queries, keys, before, after, pairs):
    assert _share_of_band(queries, keys, before, after) * queries * keys == pairs
