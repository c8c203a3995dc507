"""Ranks agree on what any of them has chosen."""

import socket
import threading

from mindllm.launch.meeting import RendezvousClient, Table
from mindllm.train.job.ranks import ALONE, Ranks

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
    assert ALONE.agree("SIGINT", CHOICES) == "SIGINT"
    assert ALONE.sum([1.5]) == [1.5]
    assert ALONE.is_first
    ALONE.meet()
