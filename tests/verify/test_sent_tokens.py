"""Sorted tokens that are sent to their experts in lengths: as on one device whatever is chosen, and mistakes that are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execute_clusters import Compiled, compiled_cluster, judged, tampered

from mindllm.compiled.conformance import findings
from mindllm.compiled.execute.exchange import UnequalCounts
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.verify import single
from mindllm.verify.side import train_cluster, train_single

LARGE = 1.0  # beside embeddings, which are a tenth of it
pytestmark = pytest.mark.slow
ORDER = "order-SentTokens"


@pytest.fixture(scope="module")
def cluster(graph_cache) -> Compiled:
    return compiled_cluster("sent experts", graph_cache)


@pytest.mark.parametrize("chosen", [(0, 1), (2, 3), (1, 2)])
def test_tokens_that_all_choose_alike_are_computed_as_on_one_device(cluster, chosen, monkeypatch):
    """Of two ranks with two experts each: all go to one of them, or to one expert of each; the others are chosen by nobody."""
    disturbed = single._disturb

    def alike(name: str, item: np.ndarray) -> np.ndarray:
        """All tokens are large in the first channel, which alone the router reads."""
        item = disturbed(name, item)
        if name.endswith("embedding_weight"):
            item[:, 0] = LARGE
        if name.endswith("router.weight"):
            item[:] = 0
            item[:, 0] = [(expert in chosen) + 0.1 * expert for expert in range(len(item))]
        return item

    monkeypatch.setattr(single, "_disturb", alike)
    reference = train_single(cluster.config, 1)
    loads = [counted for name, counted in reference.counts[0].items() if counted.size >= 4]
    assert loads
    assert all(set(np.flatnonzero(counted[:4])) == {*chosen} for counted in loads)
    comparisons = train_cluster(cluster.config, cluster.graphs, reference)
    problems = [problem for one in comparisons for problem in one.problems()]
    assert problems == []


def test_it_computes_and_conforms(cluster):
    assert judged(cluster).ok
    assert [finding.problems for finding in findings(cluster.config, cluster.graphs) if not finding.holds] == []


def everywhere(cluster: Compiled, where, change) -> list[CompiledGraph]:
    return [tampered(graph, where, change) for graph in cluster.graphs]


def dropped(node: Node) -> list[Node]:
    return [replace(node, op="TensorMove")]


def exchanges_counts(node: Node) -> bool:
    return node.op == "AlltoAll" and ORDER in node.scope


def test_counts_of_the_wrong_rank_are_named(cluster):
    """What a rank sends is taken for what arrives."""
    with pytest.raises(
        UnequalCounts, match=r"AlltoAllV at Default/.*rank \d sends rank \d \d+ blocks, which expects \d+"
    ):
        judged(cluster, everywhere(cluster, exchanges_counts, dropped))


FAULTS = {
    "results are taken in the order of experts": lambda node: node.op == "Gather" and "sort_back" in node.scope,
    "so are gradients": lambda node: node.scope.endswith("sort_arrived-RowsInOrder/Gather-op1"),
    "tokens are taken as they arrive": lambda node: node.scope.endswith("sort_arrived-RowsInOrder/Gather-op0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_are_not_put_in_order_are_found(cluster, fault):
    outcome = judged(cluster, everywhere(cluster, FAULTS[fault], dropped))
    assert any("experts" in problem for problem in outcome.problems)


def test_tokens_sent_over_other_ranks_are_told_by_the_graphs(cluster):
    """A group that has the same number of ranks."""
    sends = lambda node: node.op == "AlltoAllV" and not node.backward  # noqa: E731
    elsewhere = lambda node: [replace(node, attributes={**node.attributes, "group_rank_ids": (0, 2)})]  # noqa: E731
    found = {one.what: one for one in findings(cluster.config, everywhere(cluster, sends, elsewhere))}
    assert found["sizes"].problems[0] == "ranks 0-1: layer 0 sends tokens over ranks 0, 2, experts are on 0-1"


def test_tokens_that_are_not_sent_back_are_told_by_the_graphs(cluster):
    back = lambda node: node.scope.endswith(f"{ORDER}/AlltoAllV-op2")  # noqa: E731
    found = {one.what: one for one in findings(cluster.config, everywhere(cluster, back, dropped))}
    width = cluster.config.model.config.hidden_size
    assert found["sizes"].problems[0] == (
        f"ranks 0-1: layer 0 sends blocks of 1, {width} elements to its experts in a step and back, not 1, {width}, {width}"
    )
