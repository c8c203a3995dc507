"""Who shares the experts of sorted tokens, and what the compiler and readers of its graph are told of it."""

import pytest

from mindllm.compiled.graph.mind_ir import _with_ranks
from mindllm.parallel.layout import GROUP_RANKS, Mesh


@pytest.mark.parametrize(("rank", "ranks"), [(0, (0, 1)), (3, (2, 3)), (6, (6, 7))])
def test_ranks_that_share_experts_are_neighbours(rank, ranks):
    assert Mesh(2, 2, 2, expert_parallel=2, expert_model_parallel=1).expert_ranks(rank) == ranks


def test_layouts_of_experts_name_axes_of_experts():
    mesh = Mesh(2, 2, expert_parallel=2, expert_model_parallel=1)
    tokens = mesh.named((("replica", "ep"), None)).to_dict()
    assert tokens["device_matrix"] == (2, 2, 1)
    assert tokens["alias_name"] == ("replica", "ep", "etp")
    assert tokens["tensor_map"] == ((2, 1), -1)


def test_exchanges_of_a_model_have_the_ranks_of_their_group_and_so_have_their_gradients():
    """The compiler writes all ranks of the stage where it does not know a group."""
    everybody = (0, 1, 2, 3)
    found = _with_ranks(
        {
            "AllGather": {"group": "ours", "group_rank_ids": everybody, GROUP_RANKS: (2, 3)},
            "gradient": {"group": "ours", "group_rank_ids": everybody},
            "AllReduce": {"group": "of the compiler", "group_rank_ids": everybody},
            "Add": {},
        }
    )
    assert [one.get("group_rank_ids") for one in found.values()] == [(2, 3), (2, 3), everybody, None]
