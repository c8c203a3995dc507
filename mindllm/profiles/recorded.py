"""What a profiler recorded of one rank, as values, whichever files it was read from. Times are seconds of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mindllm.timing.costs.work import Operator

What = TypeVar("What")
SENT, RECEIVED = "Send", "Receive"


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran once.

    Attributes:
        name: full name with the scope of its cell, as far as the recording has it.
        type: of the operator, such as ``MatMulV3``.
        seconds: that it took.
        ran: the operator by its shapes, or why it cannot be told.
        shapes: of its operands, as recorded.
        waited: seconds in which its stream had nothing before it.
    """

    name: str
    type: str
    seconds: float
    ran: Operator | str
    shapes: str = ""
    waited: float = 0.0


@dataclass(frozen=True)
class Collective:
    """An exchange that ran once.

    Attributes:
        op: ``AllReduce``, ``AllGather``, ...; or ``Send`` and ``Receive``.
        group: name of the group of ranks.
        seconds: from its start to its end.
        waited: part of these in which other ranks were not there.
        bytes: that this rank sent; 0: not recorded.
    """

    op: str
    group: str
    seconds: float
    waited: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class LinkRate:
    """What exchanges of a kind reached over one link between two ranks, in bytes a second.

    Attributes:
        op: of the exchanges.
        group: name of the group of ranks.
        link: the two ranks of the group, as ``0-3``.
        transport: HCCS, RDMA, ...
        rate: over all of them.
    """

    op: str
    group: str
    link: str
    transport: str
    rate: float


@dataclass(frozen=True)
class StepParts:
    """Where a recorded step went, in seconds; the step is ``computing + exposed + free``.

    Attributes:
        exposed: exchanges with nothing computed meanwhile; those between stages are among them.
        hidden: exchanges while something is computed.
        between_stages: Sends and Receives.
        begins: from the start of the step to the first task of the device; part of ``free``.
    """

    computing: float
    exposed: float
    hidden: float
    free: float
    between_stages: float = 0.0
    begins: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.computing + self.exposed + self.free


@dataclass(frozen=True)
class Ran(Generic[What]):
    """Kernels or exchanges that ran in so many steps."""

    each: Sequence[What]
    steps: int


@dataclass(frozen=True)
class RankRecord:
    """The mean step of one rank.

    Attributes:
        steps: that the mean is of.
        kernels, collectives: that ran; None: the recording does not say.
        links: what exchanges reached, link by link; empty: not recorded.
        notes: what was not found, or not read, and why.
    """

    rank: int
    directory: Path
    parts: StepParts
    steps: int
    kernels: Ran[Kernel] | None
    collectives: Ran[Collective] | None
    notes: tuple[str, ...] = ()
    links: tuple[LinkRate, ...] = ()
