"""Ranks agree on what any of them has chosen; devices that cannot be run on are refused with what to write instead."""

import socket
import threading

import pytest
from small_cluster import cluster_run

from mindllm.errors import UserError
from mindllm.launch.meeting import Seat, Table
from mindllm.train.ranks import ALONE, Ranks
from mindllm.train.runnable import refuse_what_is_only_compiled

CHOICES = ["SIGTERM", "SIGINT"]


def agreed(*chosen):
    """What ranks that have chosen these get to hear, each from its own thread."""
    ends = [socket.socketpair() for _ in chosen]
    heard = {}

    def ask(rank):
        heard[rank] = Ranks(rank, len(chosen), Seat(ends[rank][1])).agree(chosen[rank], CHOICES)

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


CPU = {"device_target": "CPU"}


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"dp": 2, "tp": 2, "context": CPU}, ["model_parallel 2, pipeline_stage 1", "compiled", "model_parallel: 1"]),
        ({"pp": 2, "micro": 2, "context": CPU}, ["pipeline_stage 2", "compiled"]),
        (
            {"dp": 2, "context": CPU, "parallel": {"enable_parallel_optimizer": True}},
            ["enable_parallel_optimizer", "write false"],
        ),
        ({"dp": 2, "context": CPU, "parallel": {"gradients_mean": True}}, ["gradients_mean", "twice"]),
        ({"dp": 2}, ["on Ascend several devices can be compiled", "use_parallel: false"]),
    ],
)
def test_what_is_only_compiled_is_refused_with_advice(sections, wanted):
    with pytest.raises(UserError) as caught:
        refuse_what_is_only_compiled(cluster_run(**sections))
    for word in wanted:
        assert word in str(caught.value)


def test_replicas_on_cpu_run():
    refuse_what_is_only_compiled(cluster_run(dp=2, context=CPU))
