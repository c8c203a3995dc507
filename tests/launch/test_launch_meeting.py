"""Ranks meet: sums are those of all, however messages are cut on their way and in whatever order ranks come."""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.errors import RunFailed
from mindllm.launch.meeting import RendezvousClient, Table, pack, unpack

numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8)


@pytest.fixture
def party():
    """A table, and the ends of two ranks."""
    ends = [socket.socketpair() for _ in range(2)]
    yield Table([here for here, _ in ends]), [there for _, there in ends]
    for pair in ends:
        for end in pair:
            end.close()


@given(numbers, st.data())
def test_a_message_is_read_once_it_is_whole(values, data):
    message = pack(values)
    cut = data.draw(st.integers(0, len(message)))
    assert unpack(message[:cut]) == (tuple(values) if cut == len(message) else None)


def test_all_ranks_get_the_sums_once_the_last_one_has_come(party):
    table, (first, second) = party
    first.sendall(pack([1.5, 2.0]))
    assert table.receive(0)
    assert table.waiting() == [0]
    message = pack([10.0, 0.25])
    second.sendall(message[:7])
    assert table.receive(1)
    second.sendall(message[7:])
    assert table.receive(1)
    assert table.waiting() == []
    assert [unpack(end.recv(100)) for end in (first, second)] == [(11.5, 2.25)] * 2


def test_a_seat_waits_for_the_others_as_long_as_it_takes(party):
    table, ends = party
    results = {}
    threads = [
        threading.Thread(
            target=lambda rank=rank: results.update(
                {rank: [RendezvousClient(ends[rank]).sum([rank, step]) for step in range(3)]}
            )
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for rank, connection in enumerate(table.connections):
            connection.settimeout(0.01)
            try:
                table.receive(rank)
            except TimeoutError:
                continue
    assert results == {rank: [[1.0, 0.0], [1.0, 2.0], [1.0, 4.0]] for rank in range(2)}


def test_ranks_that_add_different_things_are_told_apart(party):
    table, (first, second) = party
    first.sendall(pack([1.0]))
    second.sendall(pack([1.0, 2.0]))
    table.receive(0)
    with pytest.raises(RunFailed, match=r"different ways.*\[1, 2\]"):
        table.receive(1)


def test_a_rank_without_its_launcher_says_so(party):
    table, (first, _) = party
    table.connections[0].close()
    with pytest.raises(RunFailed, match="launcher"):
        RendezvousClient(first).sum([1.0])
    assert not table.waiting()


def test_a_rank_that_has_left_is_noticed(party):
    table, (first, _) = party
    first.close()
    assert not table.receive(0)
