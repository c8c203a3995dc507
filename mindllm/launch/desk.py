"""Where the launchers of other nodes join the first one's, on the port after MindSpore's."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindllm.errors import RunFailed
from mindllm.launch.entrance import Entrance
from mindllm.launch.layouts import LayoutBook
from mindllm.launch.lines import SignedLine
from mindllm.launch.nodes import Node, RemoteClient, RemoteProcess
from mindllm.launch.secret import Secret

LOOK_SECONDS = 0.5
TEXT = 1000  # characters of a host's name or a directory
VARIABLES = frozenset(
    (
        "MS_WORKER_NUM",
        "MS_SCHED_HOST",
        "MS_SCHED_PORT",
        "MS_TOPO_TIMEOUT",
        "MS_RETRY_INTERVAL_LOWER",
        "MS_RETRY_INTERVAL_UPPER",
        "MS_DISABLE_HEARTBEAT",
        "MS_ROLE",
        "MS_NODE_ID",
        "RANK_SIZE",
        "RANK_ID",
        "MINDLLM_JOB",
    )
)
"""Environment variables of a rank that the first node decides on; others are its own node's."""


class RendezvousServer:
    """Lets in who knows the job's ``secret``, all who ask at once; a context manager that forgets the secret.

    ``told`` is given a line for people where somebody was sent away, or nodes are not waited for. With a ``book`` nodes that have
    been lost are waited for ``patience`` seconds; then the job goes on in its layout for the nodes that are there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        workers: int,
        local: int,
        timeout: float,
        secret: Secret,
        told: Callable[[str], None] = lambda text: None,
        book: LayoutBook | None = None,
        patience: float = 0.0,
    ) -> None:
        self.workers, self.local, self.timeout = workers, local, timeout
        self._book, self._patience = book, timeout
        self._patience_for_lost = min(patience, timeout)
        self._seated: list[int] = []  # numbers of the other nodes that have ranks, in the order of their ranks
        self.host, self.port = host, port + 1
        self.nodes: dict[int, Node] = {}
        self._told = told
        self.entrance = Entrance((self.host, self.port), secret, self._admit, told)

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *exception: object) -> None:
        lines = [node.line for node in self.nodes.values()]
        for line in lines:
            line.send_last(finished=True)
        for line in lines:
            line.close_heard()
        self.entrance.close()

    def gather(self, go_on: Callable[[], None]) -> int:
        """Waits until every node has joined, or those of a layout; gives them their ranks and returns how many there are.

        What ``go_on`` raises ends the waiting.

        Raises:
            RunFailed: nodes that have not joined in time, or are gone already.
        """
        start, patience = time.monotonic(), self._patience
        while missing := self._missing():
            go_on()
            waited = time.monotonic() - start
            if (ranks := self._fitting()) and (waited >= patience or ranks == self._most()):
                break
            if (left := self.timeout - waited) <= 0:
                raise RunFailed(
                    f"node {', '.join(map(str, missing))} did not join at {self.host} within {self.timeout:.0f} s; start the "
                    f"same command there with its NODE_RANK{self.entrance.strangers_told()}"
                )
            self.entrance.serve(min(left, LOOK_SECONDS))
            self._hear_nodes()
        self._patience = self._patience_for_lost
        return self._seat(missing)

    def _missing(self) -> list[int]:
        there = {number for number, node in self.nodes.items() if not node.gone}
        return sorted(set(range(1, self.workers // self.local)) - there)

    def _most(self) -> int | None:
        """How many ranks a job of all nodes has."""
        return self.workers if self._book is None else self._book.fitting(self.workers, self.local)

    def _fitting(self) -> int | None:
        """How many ranks a job of the nodes that are there has; None: there is no layout for so few."""
        there = self.workers - self.local * len(self._missing())
        if self._book is not None:
            return self._book.fitting(there, self.local)
        return there if there == self.workers else None

    def _seat(self, missing: Sequence[int]) -> int:
        """Gives as many nodes their ranks as the layout has; the others are spares."""
        ranks = self._fitting()
        assert ranks is not None
        self.nodes = {number: node for number, node in sorted(self.nodes.items()) if not node.gone}
        self._seated = [*self.nodes][: ranks // self.local - 1]
        for number in self.nodes:
            place = self._seated.index(number) + 1 if number in self._seated else None
            self.nodes[number].begin([] if place is None else self._ranks(place), ranks)
        if ranks != self._most():
            self._told(
                f"not waiting for node {', '.join(map(str, missing))}: the layout for {ranks} devices is started"
            )
        return ranks

    def _hear_nodes(self) -> None:
        """Takes what those say that have joined, and notices those that are gone again."""
        nodes = {node.line: node for node in self.nodes.values() if not node.gone}
        for line in select.select([*nodes], [], [], 0)[0]:
            nodes[line].receive()

    def start(self, rank: int, variables: Mapping[str, str]) -> tuple[RemoteProcess, RemoteClient]:
        """Starts a rank on its node; returns it, and where it is answered."""
        node = self.nodes[self._seated[rank // self.local - 1]]
        node.line.send(start=rank, variables={name: variables[name] for name in VARIABLES & variables.keys()})
        return RemoteProcess(node, rank), RemoteClient(node, rank)

    def _admit(self, line: SignedLine, messages: Sequence[Mapping[str, Any]]) -> None:
        """Takes in a launcher that has shown that it knows the secret, by the first of its messages."""
        hello = messages[0]
        if problem := self._misfit(hello):
            line.send_last(refused=problem)
            line.close_heard()
            return
        node = Node(
            line, hello["node"], hello["ranks"], str(hello.get("host"))[:TEXT], str(hello.get("log_dir"))[:TEXT]
        )
        node.note(messages[1:])
        self.nodes[node.number] = node

    def _misfit(self, hello: Mapping[str, Any]) -> str:
        """Why a launcher cannot be one of this job's; empty where it can."""
        self._hear_nodes()
        number = hello.get("node")
        if (
            type(number) is not int
            or not 1 <= number < self.workers // self.local
            or hello.get("ranks") != self._ranks(number)
        ):
            return (
                f"node 0 was started with {self.workers} workers, {self.local} on each node; NODE_RANK {number} was not"
            )
        if number in self.nodes and not self.nodes[number].gone:
            return f"NODE_RANK {number} has joined already, on {self.nodes[number].host}; each node needs its own"
        return ""

    def _ranks(self, number: int) -> list[int]:
        return [*range(number * self.local, (number + 1) * self.local)]
