"""Several nodes that hold one acceptance: node 0 decides, and the others take part in each run.

Each run is a job of all nodes, as ``mindllm launch`` starts it. Beside it the nodes keep a line to node 0 from beginning to end,
on the second port after that of the runs. Node 0 says on it: ``check`` (look at your node), ``run`` (a job by its name), ``over``
(a job has failed here), ``finished`` (the exit code). Others say: ``checked``, ``ended`` (their part of a job), ``stop``.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindllm.command import INTERRUPTED, PATH_ERRORS
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.launch.entrance import Entrance
from mindllm.launch.lines import SignedLine
from mindllm.launch.secret import Secret
from mindllm.launch.start import SEVERAL_NODES_PORT, GoOn, Launch, launch, unasked
from mindllm.units import counted
from mindllm.versions import __version__

LOOK_SECONDS = 0.5
PARTS_SECONDS = 120.0  # for the others to end their part of a run that has ended on node 0, and to look at their nodes
SUBJECT = re.compile(r"[A-Za-z ]{1,40}")
STATES = ("good", "no", "unknown")
OUTPUT = "--output"
Tell = Callable[[str], None]
Start = Callable[[str, Launch, GoOn], int]
States = Sequence[tuple[str, str]]
"""What preflight says of a node: state by subject."""


class NodeLost(RunFailed):
    """Other nodes are gone, so nothing can be run on all of them."""

    def __init__(self, numbers: Sequence[int], text: str = "") -> None:
        self.said = f"node {', '.join(map(str, numbers))} {'was' if len(numbers) == 1 else 'were'} lost"
        super().__init__(f"{self.said}{': ' if text else ''}{text}")


def control_port(place: Launch) -> int:
    """Return the port of node 0 on which nodes keep their line; the two before it are those of runs."""
    return (place.port or SEVERAL_NODES_PORT) + 2


def secret_of(place: Launch) -> Secret:
    """Return the secret of the nodes, in the directory that they share."""
    return Secret(place.shared_dir, control_port(place), OUTPUT)


def start_job(wanted: Launch, go_on: GoOn = unasked) -> int:
    """Start this node's part of a run; nobody is told anything, as its logs are kept."""
    wanted.log_dir.mkdir(parents=True, exist_ok=True)
    return launch(wanted, lambda line: None, lambda written: None, go_on)


@dataclass
class Other:
    """Another node, as far as it has spoken."""

    line: SignedLine
    number: int
    here: int
    gone: bool = False
    checked: States | None = None
    ended: dict[str, int] = field(default_factory=dict)


class Nodes:
    """Node 0's view of all nodes; a context manager that tells the others how it has ended. One node has no others.

    Attributes:
        place: how the nodes find each other: ``workers`` devices, ``local_workers`` of each.
        code: exit code that the others are told, where no error ends the block.
    """

    def __init__(self, place: Launch, here: int = 0, told: Tell = lambda text: None) -> None:
        self.place, self.code, self._stopped = place, RunFailed.exit_code, False
        self._least, self._told = here, told
        self._others: dict[int, Other] = {}
        self._refused = ""
        self._entrance: Entrance | None = None

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return self.place.workers // self.place.local_workers

    @property
    def devices_here(self) -> int:
        """Ascend devices of the node that has the fewest."""
        return min([self._least, *(other.here for other in self._others.values())])

    def __enter__(self) -> Nodes:
        if self.count > 1:
            address = self.place.master_addr, control_port(self.place)
            self._entrance = Entrance(address, secret_of(self.place), self._admit, self._told)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        code = self.code if error is None else code_of(error)
        lines = [other.line for other in self._others.values() if not other.gone]
        for line in lines:
            line.send_last(finished=code)
        for line in lines:
            line.close_heard()
        if self._entrance is not None:
            self._entrance.close()

    def gather(self) -> None:
        """Wait until all nodes have come.

        Raises:
            RunFailed: one has not come in time, or has gone again.
            UserError: one was started otherwise.
        """
        if self._entrance is None:
            return
        where = f"{self.place.master_addr} port {control_port(self.place)}"
        self._told(f"waiting at {where} for {counted(self.count - 1, 'other node')}")
        deadline = time.monotonic() + self.place.timeout
        while missing := self._missing():
            if self._refused:
                raise UserError(self._refused)
            if (left := deadline - time.monotonic()) <= 0:
                raise RunFailed(
                    f"node {', '.join(map(str, missing))} did not come to {where} within {self.place.timeout} s: start the same "
                    "command there with its --node_rank; check --master_addr, the firewall, and that --output is one directory"
                    f"{self._entrance.strangers_told()}"
                )
            self._entrance.serve(min(left, LOOK_SECONDS))
            self._look()
        for other in self._others.values():
            if bool(other.here) != bool(self._least):
                raise UserError(
                    f"node {other.number} sees {counted(other.here, 'Ascend device')}, node 0 {self._least}; check the driver "
                    "where there is none, and in a container its --device"
                )

    def ask_to_check(self) -> None:
        """Have all other nodes look at themselves, as this one does meanwhile."""
        for other in self._others.values():
            other.line.send(check=True)

    def checked(self) -> list[States]:
        """Return what each of the other nodes has seen, in their order; of one that says nothing, that."""
        self._wait(lambda other: other.checked is not None)
        silent = [("answer", "no")]
        return [other.checked or silent for _, other in sorted(self._others.items())]

    def run(self, name: str, wanted: Launch) -> int:
        """Run a job on as many nodes as it has, and return its exit code when all of them have ended their parts.

        Raises:
            NodeLost: a node is gone.
            UserError, RunFailed: as :func:`mindllm.launch.start.launch`, or a node could not take part.
        """
        if wanted.local_workers == wanted.workers:
            return start_job(wanted)
        self._refuse_lost()
        for other in self._others.values():
            other.ended.pop(name, None)
            other.line.send(run=name, workers=wanted.workers, local=wanted.local_workers)
        try:
            code = start_job(wanted, lambda: self._may_go_on(name))
        except RunFailed as failure:
            self._end(name)
            if lost := self._lost():
                raise NodeLost(lost, str(failure)) from failure
            raise
        except BaseException:
            self._end(name)
            raise
        self._wait(lambda other: name in other.ended)
        return code

    def is_stopped(self) -> bool:
        """Whether another node was asked to stop."""
        self._look()
        return self._stopped

    def _end(self, name: str) -> None:
        """End a job that has failed here: the others may still wait for it."""
        for other in self._others.values():
            other.line.send(over=name)
        self._wait(lambda other: name in other.ended)

    def _wait(self, answered: Callable[[Other], bool]) -> None:
        """Wait until all other nodes have answered; one that does not for so long is taken to be lost."""
        deadline = time.monotonic() + PARTS_SECONDS
        while silent := [other for other in self._others.values() if not other.gone and not answered(other)]:
            if time.monotonic() > deadline:
                for other in silent:
                    _lose(other)
            self._look(LOOK_SECONDS)

    def _may_go_on(self, name: str) -> None:
        """Raise where a job cannot begin any more, or by msrun not end: another node has ended its part."""
        if self.is_stopped():
            raise KeyboardInterrupt
        self._refuse_lost()
        for other in self._others.values():
            if other.ended.get(name):
                raise RunFailed(f"node {other.number} could not take part; what it has printed says why")

    def _refuse_lost(self) -> None:
        if lost := self._lost():
            raise NodeLost(lost)

    def _lost(self) -> list[int]:
        self._look()
        return sorted(other.number for other in self._others.values() if other.gone)

    def _look(self, seconds: float = 0.0) -> None:
        """Hear other nodes that speak within ``seconds``."""
        lines = {other.line: other for other in self._others.values() if not other.gone}
        for line in select.select([*lines], [], [], seconds)[0]:
            messages, other = line.receive(), lines[line]
            try:
                for message in messages or ():
                    self._note(other, message)
            except (KeyError, TypeError, ValueError):
                messages = None
            if messages is None:
                _lose(other)

    def _missing(self) -> list[int]:
        """Return the nodes that are not there."""
        there = {number for number, other in self._others.items() if not other.gone}
        return sorted(set(range(1, self.count)) - there)

    def _note(self, other: Other, message: Mapping[str, Any]) -> None:
        self._stopped |= "stop" in message
        if "checked" in message:
            other.checked = [_state(subject, state) for subject, state in message["checked"]]
        if "ended" in message:
            other.ended[str(message["ended"])] = int(message["code"])

    def _admit(self, line: SignedLine, messages: Sequence[Mapping[str, Any]]) -> None:
        hello = messages[0]
        if problem := self._misfit(hello):
            self._refused = problem
            line.send_last(refused=problem)
            line.close_heard()
            return
        self._others[hello["node"]] = Other(line, hello["node"], int(hello.get("here", 0)))

    def _misfit(self, hello: Mapping[str, Any]) -> str:
        """Return why a node cannot be one of this acceptance's; empty where it can."""
        number, place = hello.get("node"), self.place
        if type(number) is not int or number not in self._missing():
            return f"--node_rank {number}: node 0 waits for nodes 1 to {self.count - 1}, each once; give each its own"
        own = (place.workers, place.local_workers, __version__)
        if (found := (hello.get("workers"), hello.get("local"), hello.get("version"))) != own:
            told = [f"{one[0]} devices, {one[1]} on each node, mindllm {one[2]}" for one in (own, found)]
            return (
                f"node 0 was started with {told[0]}; node {number} with {told[1]}: start the same command on all nodes"
            )
        theirs = Path(str(hello.get("output")))
        try:
            same = theirs.samefile(place.shared_dir)
        except OSError:
            same = False
        if not same:
            return f"--output is {place.shared_dir} on node 0 and {theirs} on node {number}: give one directory by one path"
        return ""


def code_of(error: BaseException) -> int:
    """Return the exit code that a command ends with because of an error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno in PATH_ERRORS:
        return UserError.exit_code
    return error.exit_code if isinstance(error, UserError | CheckFailed | RunFailed) else RunFailed.exit_code


def _lose(other: Other) -> None:
    other.gone = True
    other.line.close()


def _state(subject: Any, state: Any) -> tuple[str, str]:
    """Return a state of a node's preflight; raises ValueError where it may be something else, for it leaves the machine."""
    if not SUBJECT.fullmatch(subject) or state not in STATES:
        raise ValueError(f"{subject}: {state}")
    return subject, state
