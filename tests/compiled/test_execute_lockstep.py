"""Exchanges between ranks: what every collective operator gives, orders of arrival, and ranks that wait for each other."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from mindllm.compiled.execute.exchange import Deadlock, Exchange, NoExchange, UnequalCounts, UnequalParts
from mindllm.compiled.execute.lockstep import Lockstep
from mindllm.compiled.graph.compiled_graph import Node, TensorType

RANKS = (0, 1, 2)


def collective(kind: str, ranks=RANKS, **attributes) -> Node:
    attributes = {"group": "g", "group_rank_ids": ranks, **attributes}
    return Node(kind, "node", (), TensorType((), "float32"), f"Default/{kind}-op0", attributes)


class Script:
    """A rank that goes through a list of exchanges and returns what it got."""

    def __init__(self, rank: int, *steps: tuple[Node, object]) -> None:
        self.rank = rank
        self.steps = steps

    def run(self, *_):
        got = []
        for node, value, *others in self.steps:
            value = None if value is None else np.array(value, np.float32)
            got.append((yield Exchange(self.rank, node, value, tuple(others))))
        return got


def together(*scripts: Script):
    return Lockstep(scripts, {script.rank: () for script in scripts}).run()


@pytest.mark.parametrize(
    ("op", "attributes", "wanted"),
    [
        ("AllReduce", {"op": "sum"}, [[3, 3, 3]] * 3),
        ("AllReduce", {"op": "max"}, [[2, 2, 2]] * 3),
        ("AllGather", {}, [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 3),
        ("ReduceScatter", {"op": "sum"}, [[3], [3], [3]]),
        ("Broadcast", {"root_rank": 1}, [[1, 1, 1]] * 3),
        ("AlltoAll", {"split_dim": 0, "concat_dim": 0}, [[0, 1, 2]] * 3),
    ],
)
def test_what_a_collective_gives(op, attributes, wanted):
    node = collective(op, **attributes)
    for order in itertools.permutations(RANKS):
        outputs = together(*(Script(rank, (node, [rank] * 3)) for rank in order))
        assert [outputs[rank][0].tolist() for rank in RANKS] == wanted


LENGTHS = ((1, 0, 2), (0, 0, 1), (3, 2, 0))
"""What each rank sends to each, in blocks."""


EXPECTED = tuple(zip(*LENGTHS, strict=True))


def in_lengths(expected=EXPECTED, block=2):
    node = collective("AlltoAllV", block_size=block)
    return together(
        *(
            Script(rank, (node, [10 * rank + number for number in range(2 * sum(sent))], sent, expected[rank]))
            for rank, sent in enumerate(LENGTHS)
        )
    )


def test_ranks_send_each_other_different_lengths():
    """The second one sends nothing to most, and gets from one alone."""
    found = [in_lengths()[rank][0].tolist() for rank in RANKS]
    assert found == [[0, 1, 20, 21, 22, 23, 24, 25], [26, 27, 28, 29], [2, 3, 4, 5, 10, 11]]


def test_lengths_that_do_not_agree_are_named():
    wrong = ((1, 0, 3), (0, 0, 1), (2, 1, 0))
    with pytest.raises(UnequalCounts, match=r"AlltoAllV at .*: rank 2 sends rank 1 2 blocks, which expects 1"):
        in_lengths(wrong)
    with pytest.raises(UnequalCounts, match=r"rank 0 has \[6\] elements and sends 9"):
        in_lengths(block=3)
    with pytest.raises(NoExchange, match="it says neither what it sends each rank nor what it expects"):
        together(*(Script(rank, (collective("AlltoAllV"), [1])) for rank in RANKS))


def test_a_group_that_is_known_by_name_alone_is_told():
    with pytest.raises(NoExchange, match=r"AlltoAllV over ranks .* carried out here: its group is known by name alone"):
        together(Script(0, (collective("AlltoAllV", ranks=()), [1], (1,), (1,))))


def test_sends_are_kept_until_they_are_received():
    send = lambda tag: collective("Send", dst_global_rank=1, sr_tag=tag)  # noqa: E731
    receive = lambda tag: collective("Receive", src_global_rank=0, sr_tag=tag)  # noqa: E731
    first = Script(0, (send(0), [5]), (send(1), [6]))
    second = Script(1, (receive(1), None), (receive(0), None))
    assert [value.tolist() for value in together(first, second)[1]] == [[6], [5]]


def test_ranks_in_different_operators_are_a_deadlock_that_names_all():
    one, other = collective("AllReduce", op="sum"), collective("AllGather")
    with pytest.raises(Deadlock) as error:
        together(Script(0, (one, [1])), Script(1, (other, [1])), Script(2))
    lines = str(error.value).splitlines()
    assert lines[1:] == [
        "  rank 0 waits in AllReduce over ranks 0, 1, 2 at Default/AllReduce-op0",
        "  rank 1 waits in AllGather over ranks 0, 1, 2 at Default/AllGather-op0",
        "  rank 2 has finished its step",
    ]
    assert error.value.exit_code == 3


def test_a_reduction_of_another_kind_does_not_fit():
    with pytest.raises(Deadlock, match=re.escape("rank 2 waits in AllReduce over ranks 0, 1, 2")):
        together(*(Script(rank, (collective("AllReduce", op="max" if rank else "sum"), [1])) for rank in RANKS))


def test_ranks_that_give_different_shapes_are_named():
    node = collective("AllReduce", op="sum")
    with pytest.raises(UnequalParts, match=r"AllReduce at Default/AllReduce-op0: rank 0 gives \[1\], rank 2 \[2\]"):
        together(*(Script(rank, (node, [1] * (2 if rank == 2 else 1))) for rank in RANKS))


def test_what_cannot_be_dealt_out_is_named():
    with pytest.raises(UnequalParts, match=r"ReduceScatter at .*: \[4\] cannot be dealt out to 3 ranks"):
        together(*(Script(rank, (collective("ReduceScatter", op="sum"), [1] * 4)) for rank in RANKS))


def test_what_was_sent_and_not_received_is_named():
    """Every rank ends its step, but on devices the sender would wait for ever."""
    send = collective("Send", dst_global_rank=1, sr_tag=4)
    with pytest.raises(Deadlock) as error:
        together(Script(0, (send, [5])), Script(1))
    assert str(error.value).splitlines() == [
        "what a rank sent was never received:",
        "  rank 0 has finished its step",
        "  rank 1 has finished its step",
        "  rank 0 has sent to rank 1 what it has not received (tag 4)",
    ]
