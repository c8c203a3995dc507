"""Nodes among each other: ports that are free, a master that answers, one directory, and clocks that agree.

The check runs on all nodes at the same time. The first one listens on the port of the run and writes a number into the shared
directory; the others ask it for the time and the number.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindllm.launch.doorway import Doorway
from mindllm.launch.lines import Line
from mindllm.preflight.finding import Finding, bad, good

NUMBER_FILE = ".preflight-number"
SKEW_SECONDS = 1.0
RETRY_SECONDS = 0.2
ANSWER_SECONDS = 5.0
HOST_CHARACTERS = 200


def check_ports(host: str, port: int) -> Iterator[Finding]:
    """The two ports of the first node."""
    for number in (port, port + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, number))
            except OSError as error:
                yield bad(
                    "port", f"{host}:{number}: {error.strerror}", "Give another MASTER_PORT, or this node's own address"
                )
                continue
        yield good("port", f"{host}:{number} is free")


class Asking:
    """Another node that asks; a guest of a doorway. It is told the time and the number, and ``told`` who it says it is."""

    def __init__(self, connection: socket.socket, number: str, told: Callable[[int, str], None]) -> None:
        self._line, self._number, self._told = Line(connection), number, told

    def fileno(self) -> int:
        return self._line.fileno()

    def hear(self) -> bool:
        """See :class:`mindllm.launch.doorway.Guest`."""
        if not (messages := self._line.receive()):
            return messages is not None
        asked = messages[0]
        if "done" in asked:  # it has read the answer
            return False
        self._line.send(time=time.time(), number=self._number)
        if type(asked.get("node")) is int:
            self._told(asked["node"], str(asked.get("host"))[:HOST_CHARACTERS])
        return True

    def leave(self) -> None:
        """See :class:`mindllm.launch.doorway.Guest`."""
        self._line.close()


def answer_nodes(host: str, port: int, nodes: int, directory: Path, timeout: float) -> Iterator[Finding]:
    """The first node's side: answers the others until all have asked or the time is over."""
    number = secrets.token_hex(8)
    path = directory / NUMBER_FILE
    with suppress(OSError):
        path.write_text(number)
    missing, deadline = set(range(1, nodes)), time.monotonic() + timeout
    asked: list[tuple[int, str]] = []
    listener = socket.create_server((host, port))
    doorway = Doorway(listener, lambda connection, _: Asking(connection, number, lambda *who: asked.append(who)))
    while missing and (left := deadline - time.monotonic()) > 0:
        doorway.serve(min(left, RETRY_SECONDS))
        for node, name in asked:
            if node in missing:
                missing.discard(node)
                yield good("nodes", f"node {node} ({name}) has asked")
        asked.clear()
    doorway.serve_out(ANSWER_SECONDS)
    doorway.close()
    path.unlink(missing_ok=True)
    if missing:
        named = ", ".join(map(str, sorted(missing)))
        yield bad(
            "nodes",
            f"node {named} has not asked within {timeout:.0f} s",
            "Run this there at the same time; check the firewall",
        )


def ask_master(host: str, port: int, node: int, directory: Path, timeout: float) -> Iterator[Finding]:
    """Another node's side."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                advice = "Run this on node 0 at the same time; check MASTER_ADDR, MASTER_PORT and the firewall"
                yield bad("master", f"{host}:{port} does not answer: {error.strerror or error}", advice)
                return
            time.sleep(RETRY_SECONDS)
    with connection:
        line, start = Line(connection), time.time()
        line.send(node=node, host=socket.gethostname())
        answer = line.receive_first(ANSWER_SECONDS)
        end = time.time()
        seen = _read(directory / NUMBER_FILE)
        line.send(done=True)
    if answer is None or not isinstance(answer.get("time"), int | float):
        yield bad("master", f"{host}:{port} is used by something else", "Give another MASTER_PORT")
        return
    yield good("master", f"{host}:{port} answers in {end - start:.4f} s")
    yield _check_clock(answer["time"] - (start + end) / 2)
    if seen == answer.get("number"):
        yield good("shared directory", f"{directory} is the one node 0 sees")
    else:
        yield bad(
            "shared directory", f"{directory} is not the one node 0 sees", "Mount the same file system on all nodes"
        )


def _check_clock(skew: float) -> Finding:
    seen = f"node 0 is {abs(skew):.2f} s {'ahead' if skew > 0 else 'behind'}"
    return good("clock", seen) if abs(skew) <= SKEW_SECONDS else bad("clock", seen, "Start chrony or ntpd on both")


def _read(path: Path) -> str:
    for _ in range(10):  # network file systems show a new file after a moment
        with suppress(OSError):
            return path.read_text()
        time.sleep(RETRY_SECONDS)
    return ""


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """The findings for programs."""
    return {"findings": [dict(finding.__dict__) for finding in findings]}
