"""Ranks agree on what any of them has chosen."""

import socket
import threading

from mindllm.launch.meeting import RendezvousClient, Table
from mindllm.train.job.ranks import SINGLE_RANK, Ranks

CHOICES = ["SIGTERM", "SIGINT"]


def agreed(*chosen):
    """What ranks that have chosen these get to hear, each from its own thread."""
    ends = [socket.socketpair() for _ in chosen]
    heard = {}

    def ask(rank):
        heard[rank] = Ranks(rank, len(chosen), RendezvousClient(ends[rank][1])).agree(chosen[rank], CHOICES)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(chosen))]
    for thread in threads:
        thread.start()
    table = Table([here for here, _ in ends])
    for rank in range(len(chosen)):
        table.receive(rank)
    for thread in threads:
        thread.join()
    return [heard[rank] for rank in range(len(chosen))]


def test_all_ranks_stop_when_one_was_asked_to():
    assert agreed("", "", "") == ["", "", ""]
    assert agreed("", "SIGINT", "") == ["SIGINT"] * 3
    assert agreed("SIGINT", "SIGTERM") == ["SIGTERM"] * 2


def test_alone_nothing_is_waited_for():
    assert SINGLE_RANK.agree("SIGINT", CHOICES) == "SIGINT"
    assert SINGLE_RANK.sum([1.5]) == [1.5]
    assert SINGLE_RANK.is_first
    SINGLE_RANK.barrier()
