"""Messages between launchers: the last one is heard by an end that was just sending."""

import select
import socket
import subprocess
import sys
import time

from mindllm.launch.lines import Line

CONVERSATIONS = (
    2000  # where the one end closes at once, more than one in a hundred of the others do not hear its last word
)
FIRST_NODE = f"""
import random, socket, sys, time
from mindllm.launch.lines import Line
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    for _ in range({CONVERSATIONS}):
        line = Line(listener.accept()[0])
        time.sleep(random.random() * 3e-4)
        line.send(kill=1)
        line.send_last(finished=True)
        line.close_heard()
"""


def said_by(line):
    """What the other end says until its last word, while this one sends all the time."""
    heard = []
    while {"finished": True} not in heard:
        line.send(beats=1)
        if select.select([line], [], [], 1e-5)[0]:
            if (messages := line.receive()) is None:
                return heard
            heard += messages
    return heard


def test_the_last_message_is_heard_by_an_end_that_is_sending():
    with subprocess.Popen([sys.executable, "-c", FIRST_NODE], stdout=subprocess.PIPE, text=True) as other:
        port = int(other.stdout.readline())
        heard = []
        for _ in range(CONVERSATIONS):
            line = Line(socket.create_connection(("127.0.0.1", port)))
            heard.append(said_by(line))
            line.close()
    assert other.returncode == 0
    assert not [messages for messages in heard if messages != [{"kill": 1}, {"finished": True}]]


def test_an_end_that_does_not_close_is_not_waited_for_for_ever():
    one, other = map(Line, socket.socketpair())
    one.send_last(finished=True)
    begun = time.monotonic()
    one.close_heard(0.2)
    assert time.monotonic() - begun >= 0.2
    assert other.receive() == [{"finished": True}]
    assert other.receive() is None
    other.close()


def test_a_machine_without_power_is_noticed_by_tcp(port):
    with socket.create_server(("127.0.0.1", port)):
        line = Line(socket.create_connection(("127.0.0.1", port)))
        connection = line.connection
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, each, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        line.close()
    assert idle + each * count <= 90
