"""Strangers on the port where nodes join, and in place of node 0: they learn nothing, start nothing and delay nobody."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from test_launch_nodes import begin, finish

from mindllm.errors import RunFailed
from mindllm.launch.desk import RendezvousServer
from mindllm.launch.doorway import MOST_GUESTS
from mindllm.launch.handshake import Answering, ask
from mindllm.launch.heartbeat import beat_path, read_beats
from mindllm.launch.lines import FIRST, Line, SignedLine
from mindllm.launch.meeting import HEADER, MOST_NUMBERS, Table
from mindllm.launch.nodes import Node
from mindllm.launch.secret import Secret, SecretMissing

NONCE = json.dumps({"nonce": "0" * 64}).encode()
HELLO = json.dumps({"node": 1, "ranks": [2, 3], "host": "me", "log_dir": "log"}).encode()
NONSENSE = {
    "silent": b"",
    "text": b"hello\n",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "bytes": bytes(range(256)) + b"\n",
    "zeros": bytes(1 << 20),
    "no end": b"x" * (FIRST + 1),
    "empty lines": b"\n" * 100,
    "list": b"[]\n",
    "number": b"7\n",
    "null": b"null\n",
    "deep": b"[" * 5000 + b"\n",
    "digits": b"1" * 5000 + b"\n",
    "surrogate": b'{"nonce": "\\ud800"}\n',
    "hello": HELLO + b"\n",
    "seat": b'{"seat": 2}\n',
    "wrong types": b'{"nonce": {"a": [1]}}\n',
    "no hexadecimals": json.dumps({"nonce": "é" * 64}).encode() + b"\n",
    "unsigned after the number": NONCE + b"\n" + HELLO + b"\n",
    "signed with nothing": NONCE + b"\n" + b"0" * 64 + b" " + HELLO + b"\n",
    "half a line": NONCE[:20],
}


def connected(port, content):
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    with suppress(OSError):  # it was sent away while it spoke
        connection.sendall(content)
    return connection


def test_a_job_begins_beside_all_kinds_of_strangers_and_tells_them_nothing(port):
    first = begin("print(seat.sum([rank + 1.0]))", port, 0)
    wait_for_port(port + 1)
    strangers = {name: connected(port + 1, content) for name, content in NONSENSE.items()}
    second = begin("print(seat.sum([rank + 1.0]))", port, 1)
    printed, _ = finish([first, second], [0, 0])
    assert printed.splitlines()[-1] == "[10.0]"
    assert "sent away: 127.0.0.1 on port" in printed
    heard = {name: everything(stranger) for name, stranger in strangers.items()}
    assert not {name: said for name, said in heard.items() if said and not said.startswith(b'{"nonce": "')}
    assert not any(b"MS_" in said or b"rank" in said for said in heard.values())
    assert max(map(len, heard.values())) < 200
    assert not list(Path("shared").iterdir())  # the secret goes with the job


def wait_for_port(port):
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        threading.Event().wait(0.05)
    raise AssertionError("nobody listens")


def everything(connection):
    said = b""
    with connection, suppress(OSError):
        while piece := connection.recv(1 << 16):
            said += piece
    return said


FALSE_ORDERS = {"start": 2, "variables": {"PYTHONPATH": "evil", "RANK_ID": "2"}}


@pytest.mark.parametrize("answer", [{"welcome": True}, {"nonce": "0" * 64}, {"nonce": 3}, None])
def test_who_answers_in_place_of_node_0_starts_nothing_and_is_not_told_who_asks(port, answer):
    Path("evil").mkdir()
    Path("evil/sitecustomize.py").write_text("open('ran', 'w').close()")
    Secret(Path("shared"), port).draw()
    heard = []
    with socket.create_server(("127.0.0.1", port + 1)) as false:
        serving = threading.Thread(target=give_orders, args=(false, answer, heard), daemon=True)
        serving.start()
        (printed,) = finish([begin("", port, 1, ["--timeout", "2"])], [1])
    assert "could not join" in printed
    assert "does not know the secret in shared/.launch-secret-" in printed
    assert not Path("ran").exists()
    assert not list(Path("log_1").iterdir())
    assert heard
    assert not any(b"log_1" in said for said in heard)


def give_orders(listener, answer, heard):
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            heard.append(connection.recv(1 << 16))
            orders = [answer, FALSE_ORDERS] if answer else [FALSE_ORDERS]
            connection.sendall(b"".join(json.dumps(order).encode() + b"\n" for order in orders))


PRINT_VARIABLES = "print(sorted(name for name in os.environ if name in ('PYTHONPATH', 'LD_PRELOAD', 'MS_ROLE')))"


def test_only_variables_known_by_name_are_taken_over(port):
    secret = Secret(Path("shared"), port)
    (environment := dict(os.environ)).pop("PYTHONPATH", None)
    Path("job.py").write_text(PRINT_VARIABLES.replace("print", "import os\nprint"))
    command = [sys.executable, "-m", "mindllm.launch", "--workers", "2", "--local_workers", "1", "--node_rank", "1"]
    command += ["--port", str(port), "--log_dir", "log", "--shared_dir", "shared", "job.py"]
    launcher = subprocess.Popen([sys.executable, "-c", RUN_AS.format(command[3:])], env=environment, cwd=Path.cwd())
    with RendezvousServer("127.0.0.1", port, 2, 1, 60, secret) as desk:
        desk.gather(lambda: None)
        node = desk.nodes[1]
        node.line.send(
            start=1, variables={"PYTHONPATH": "evil", "LD_PRELOAD": "x", "MS_ROLE": "MS_WORKER", "RANK_ID": "1"}
        )
        while 1 not in node.codes:
            assert node.receive()
    assert launcher.wait(60) == 0
    assert Path("log/worker_1.log").read_text() == "['MS_ROLE']\n"


RUN_AS = f"import sys\nsys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n" + (
    "from mindllm.launch.__main__ import main\nsys.exit(main({}))"
)


def test_a_node_that_sees_another_directory_is_told_so_on_both_sides(port):
    Secret(Path("elsewhere"), port).draw()
    launchers = [begin("", port, 0, ["--timeout", "4"])]
    wait_for_port(port + 1)
    launchers += [
        begin("", port, 1, ["--timeout", "2", "--shared_dir", directory]) for directory in ("elsewhere", "nowhere")
    ]
    first, other, missing = finish(launchers, [1, 1, 1])
    assert "From 127.0.0.1 somebody came without the secret in shared/.launch-secret-" in first
    assert "output_dir must be one that all nodes share" in other
    assert "nowhere/.launch-secret-" in missing
    assert "is not there; node 0 writes it: output_dir must be one directory that all nodes share" in missing


def test_node_0_can_be_stopped_while_it_waits_for_the_others(port):
    launcher = begin("", port, 0)
    while not Path("log_0").exists():  # made when signals are taken
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    (printed,) = finish([launcher], [143])
    assert "stopped before all nodes had joined" in printed


def test_a_node_that_is_gone_before_the_last_one_has_joined_can_join_again(port, tmp_path, monkeypatch):
    close_heard = SignedLine.close_heard
    monkeypatch.setattr(
        SignedLine, "close_heard", lambda line: close_heard(line, 0.2)
    )  # nobody closes before it is over

    def join(node):
        line = ask(socket.create_connection(("127.0.0.1", port + 1)), secret.read(), 30, lambda: None)
        line.send(node=node, ranks=[node], host="here", log_dir="log")
        return line

    secret, lines = Secret(tmp_path, port), []
    with RendezvousServer("127.0.0.1", port, 3, 1, 60, secret) as desk:
        gathering = threading.Thread(target=desk.gather, args=(lambda: None,))
        gathering.start()
        join(1).close()
        lines += [join(1), join(2)]
        gathering.join(60)
        assert sorted(node.number for node in desk.nodes.values() if not node.gone) == [1, 2]
    for node, line in enumerate(lines, 1):
        assert line.receive() == [{"seat": [node], "devices": 3}, {"finished": True}]


# What is signed


@pytest.fixture
def signed():
    """Both ends of a signed line, and the sockets below them."""
    sockets = socket.socketpair()
    yield [SignedLine(end, b"s" * 32, ("a", "b"), asks) for end, asks in zip(sockets, (True, False), strict=True)]
    for end in sockets:
        end.close()


def test_what_is_signed_is_heard_in_order(signed):
    asking, answering = signed
    for number in range(3):
        asking.send(number=number)
    assert answering.receive() == [{"number": number} for number in range(3)]
    answering.send(good=True)
    assert asking.receive() == [{"good": True}]


@pytest.mark.parametrize("forged", ["changed", "again", "left out", "sent back", "unsigned", "another connection"])
def test_what_is_changed_said_again_left_out_or_sent_back_is_nonsense(signed, forged):
    asking, answering = signed
    lines = [asking.encoded(json.dumps({"number": number}).encode()) for number in range(2)]
    other = SignedLine(asking.connection, b"s" * 32, ("a", "c"), asks=True)
    sent = {
        "changed": [lines[0].replace(b"0}", b"1}")],
        "again": [lines[0], lines[0]],
        "left out": [lines[1]],
        "sent back": [answering.encoded(b"{}")],
        "unsigned": [b"{}"],
        "another connection": [other.encoded(b"{}")],
    }[forged]
    asking.connection.sendall(b"\n".join([*sent, b""]))
    assert answering.receive() is None


def test_both_ends_show_each_other_the_secret_and_neither_says_it():
    ends, admitted = socket.socketpair(), []
    answering = Answering(ends[0], b"s" * 32, lambda line, messages: admitted.append((line, messages)), lambda: None)
    said = []
    for end in ends:
        end.settimeout(30)
    thread = threading.Thread(target=lambda: said.append(ask(ends[1], b"s" * 32, 30, lambda: None)))
    thread.start()
    while thread.is_alive():
        ends[0].settimeout(0.05)
        answering.hear()
    said[0].send(node=1)
    assert not answering.hear()
    assert admitted[0][1] == [{"node": 1}]


def test_who_has_another_secret_is_none_of_them():
    ends, admitted = socket.socketpair(), []
    answering = Answering(ends[0], b"t" * 32, lambda *given: admitted.append(given), lambda: None)
    thread = threading.Thread(target=lambda: [answering.hear() or ends[0].shutdown(socket.SHUT_RDWR) for _ in range(2)])
    thread.start()
    assert ask(ends[1], b"s" * 32, 30, lambda: None) is None
    thread.join()
    assert not admitted


# What has no bounds


def test_a_line_has_a_longest_length():
    ends = socket.socketpair()
    line = Line(ends[0], longest=100)
    ends[1].sendall(b"x" * 101)
    assert line.receive() is None


def test_more_guests_than_there_is_room_for_push_the_silent_ones_out(tmp_path, port):
    with RendezvousServer("127.0.0.1", port, 4, 2, 60, Secret(tmp_path, port)) as desk:
        silent = [socket.create_connection(("127.0.0.1", port + 1)) for _ in range(MOST_GUESTS + 1)]
        while len(desk.entrance.doorway._until) < MOST_GUESTS:
            desk.entrance.doorway.serve(1)
        for _ in range(3):
            desk.entrance.doorway.serve(0.2)
        assert len(desk.entrance.doorway._until) == MOST_GUESTS
        assert silent[0].recv(1) == b""


def test_a_rank_that_announces_numbers_without_end_is_refused():
    here, there = socket.socketpair()
    table = Table([here])
    there.sendall(HEADER.pack(MOST_NUMBERS + 1))
    with pytest.raises(RunFailed, match="announces 1048577 numbers"):
        table.receive(0)


@pytest.mark.parametrize(
    "message",
    [
        {"said": 0, "content": ""}, {"said": 2, "content": "%"}, {"said": [2], "content": ""}, {"ended": 2}, {"stop": 9},
        {"ended": 2, "code": float("inf"), "tail": ""}, {"beats": []}, {"beats": {"x": {}}}, {"stop": {}},
        {"beats": {"2": {"pid": -1, "step": 1, "doing": "", "at": 0, "limit": 0, "trained": True}}},
        {"beats": {"2": {"pid": 1, "step": 1, "doing": "", "at": 10**400, "limit": 0, "trained": True}}},
    ],
)  # fmt: skip
def test_a_node_that_says_what_no_launcher_says_is_gone(message, signed):
    node = Node(signed[1], 1, [2, 3], "host", "log")
    assert not node.note([message])
    assert node.gone


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"null", b'{"pid": -1, "step": 1, "doing": "x", "at": 0, "limit": 0, "trained": false}', b"[" * 5000,
     b'{"pid": 5, "step": 1, "doing": "x", "at": "now", "limit": 0, "trained": false}',
     b'{"pid": 5, "step": 1, "doing": "x", "at": Infinity, "limit": 0, "trained": false}'],
)  # fmt: skip
def test_a_file_that_is_no_sign_of_life_is_none(tmp_path, content):
    beat_path(tmp_path, 0).write_bytes(content)
    assert read_beats(tmp_path, [0]) == {}


def test_a_pipe_in_place_of_a_sign_of_life_holds_nobody_up(tmp_path):
    os.mkfifo(beat_path(tmp_path, 0))
    assert read_beats(tmp_path, [0]) == {}


# The file


def test_the_secret_is_its_user_s_alone_new_each_time_and_gone_afterwards(tmp_path):
    secret = Secret(tmp_path / "output", 8118)
    drawn = secret.draw()
    assert secret.read() == drawn != secret.draw()
    assert secret.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in secret.path.parent.iterdir()] == [".launch-secret-8118"]
    secret.forget()
    assert not list(secret.path.parent.iterdir())


def planted(path, kind):
    content = path.read_bytes()
    if kind == "open to others":
        path.chmod(0o640)
    elif kind == "another user's":
        os.chown(path, 12345, -1)
    elif kind == "nonsense":
        path.write_text("x")
    else:
        path.unlink()
        target = path.with_name("target")
        target.write_bytes(content)
        {"a pipe": os.mkfifo, "a link": lambda link: link.symlink_to(target), "a directory": os.mkdir}[kind](path)


@pytest.mark.parametrize("kind", ["open to others", "another user's", "nonsense", "a pipe", "a link", "a directory"])
def test_a_file_that_somebody_else_may_have_planted_is_no_secret(tmp_path, kind):
    if kind == "another user's" and os.geteuid():
        pytest.skip("only root can give a file away")
    secret = Secret(tmp_path, 8118)
    secret.draw()
    planted(secret.path, kind)
    with pytest.raises(SecretMissing, match=r"\.launch-secret-8118"):
        secret.read()


def test_a_directory_that_keeps_no_modes_is_refused(tmp_path, monkeypatch):
    from mindllm.errors import UserError

    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda handle: os.stat_result([real(handle).st_mode | 0o077, *real(handle)[1:]]))
    with pytest.raises(UserError, match="keeps modes"):
        Secret(tmp_path, 8118).draw()
    assert not list(tmp_path.iterdir())


def test_nobody_is_heard_before_the_secret_is_written(tmp_path, port):
    """A node that reached the port before the secret was written was sent away, now and then, with a line about a stranger."""
    reached = []

    class Watched(Secret):
        def draw(self):
            reached.append(socket.socket().connect_ex(("127.0.0.1", port + 1)))
            return super().draw()

    with RendezvousServer("127.0.0.1", port, 2, 1, 60, Watched(tmp_path, port)):
        reached.append(socket.socket().connect_ex(("127.0.0.1", port + 1)))
    assert [code != 0 for code in reached] == [True, False]
