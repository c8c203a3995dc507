"""A node other than the first: it joins node 0, takes part in each run that node 0 names, and ends as node 0 says.

It runs nothing but what lies below its own output directory, which it shares with node 0, under names of runs.
"""

from __future__ import annotations

import re
import select
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mindllm.accept.measured import job_of
from mindllm.accept.node_states import node_states
from mindllm.accept.nodes import Tell, code_of, control_port, secret_of, start_job
from mindllm.accept.runs import RUNS
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.launch.job import JobStopped
from mindllm.launch.joining import join
from mindllm.launch.lines import SignedLine
from mindllm.launch.start import Launch
from mindllm.versions import __version__

NAME = re.compile(r"[a-z_]{1,40}")
GONE = "node 0 is gone; what it has printed says why"


def follow(place: Launch, here: int, told: Tell) -> int:
    """Take part in an acceptance until node 0 ends it; return its exit code.

    Args:
        place: how the nodes find each other, and which one this is.
        here: Ascend devices that this node has.
        told: is given lines for people.

    Raises:
        UserError: node 0 was started otherwise.
        RunFailed: node 0 was not found in time, or is gone.
    """
    address = place.master_addr, control_port(place)
    hello = {
        "node": place.node_rank, "workers": place.workers, "local": place.local_workers, "version": __version__,
        "output": str(place.shared_dir), "here": here,
    }  # fmt: skip
    told(f"node {place.node_rank}: looking for node 0 at {address[0]} port {address[1]}")
    line = join(address, secret_of(place), place.timeout, hello, told)
    line.connection.settimeout(None)
    try:
        return _Follower(place, line, here, told).serve()
    except KeyboardInterrupt:
        line.send(stop=True)
        raise
    finally:
        line.send_last(left=True)
        line.close()


class _Follower:
    """This node, which has joined."""

    def __init__(self, place: Launch, line: SignedLine, here: int, told: Tell) -> None:
        self.place, self.line, self.here, self.told = place, line, here, told
        self.over: set[str] = set()  # which may be heard together with the order to begin
        self.orders: list[dict[str, Any]] = []

    def serve(self) -> int:
        """Do what node 0 says; return the exit code when it says that."""
        self.told(f"node {self.place.node_rank}: joined node 0")
        while True:
            while not self.orders:
                self._hear()
            order = self.orders.pop(0)
            if "finished" in order:
                return int(order["finished"])
            self._obey(order)

    def _obey(self, order: Mapping[str, Any]) -> None:
        if "refused" in order:
            raise UserError(str(order["refused"]))
        if "check" in order:
            self.line.send(checked=node_states(self.place, self.here))
        if "run" in order:
            self._run(str(order["run"]), int(order["workers"]), int(order["local"]))

    def _run(self, name: str, workers: int, local: int) -> None:
        if not NAME.fullmatch(name):
            raise RunFailed(f"node 0 names a run that is none ({name!r:.80})")
        self.told(f"node {self.place.node_rank}: takes part in {name}")
        code = 0
        try:
            code = start_job(
                job_of(self.place.shared_dir / RUNS / name, self.place, workers, local), lambda: self._may_go_on(name)
            )
        except JobStopped as stopped:
            raise KeyboardInterrupt from stopped
        except (UserError, CheckFailed, RunFailed, OSError) as error:
            self.told(f"{name}: {error}")
            code = code_of(error)
        self.line.send(ended=name, code=code)

    def _may_go_on(self, name: str) -> None:
        """Raise where the run is over on node 0, or node 0 is gone."""
        if select.select([self.line], [], [], 0)[0]:
            self._hear()
        if name in self.over:
            raise RunFailed("it has ended on node 0, whose output says why")

    def _hear(self) -> None:
        if (messages := self.line.receive()) is None:
            raise RunFailed(GONE)
        for message in messages:
            with suppress(TypeError):
                self.over.add(message["over"]) if "over" in message else self.orders.append(message)
