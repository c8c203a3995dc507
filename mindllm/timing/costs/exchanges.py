"""How long a collective takes: latency and bytes over the links that its group crosses.

A group of ``n`` ranks, ``k`` of them behind one inner link, exchanges in levels as collective libraries do (Thakur et al., 2005;
NCCL's and HCCL's hierarchical algorithms): a ReduceScatter among the ``k``, an exchange of a ``k``-th part with others over
the outer link, an AllGather among the ``k``. An AllReduce sends (n - 1)/n of the tensor twice, AllGather, ReduceScatter once.
An AlltoAll has nothing to share: an n-th of what a rank has goes to every other, over whatever link is between them. Round a ring
(Liu et al., 2023) each step takes as long as the slowest link between neighbours, on which all others wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindllm.timing.device import Device

TWICE = frozenset({"AllReduce"})
TO_EACH = frozenset({"AlltoAll", "AllToAll", "AlltoAllV"})
ONE_LINK = frozenset({"Send", "Receive", "Broadcast"})
ROUND, ROUND_AND_BACK = "Ring", "RingGradient"
"""Blocks that go round a group: to every rank; and once more with their gradients, which end where they began."""
COLLECTIVES = TWICE | ONE_LINK | TO_EACH | {"AllGather", "ReduceScatter", ROUND, ROUND_AND_BACK}


@dataclass(frozen=True)
class Group:
    """``size`` ranks that are ``stride`` apart."""

    size: int
    stride: int = 1

    @property
    def span(self) -> int:
        """Ranks from the first to the last."""
        return (self.size - 1) * self.stride + 1

    def inside(self, node: int) -> int:
        """How many of its ranks a node of so many devices has, which begins with the first of them."""
        return min(self.size, -(-node // self.stride))


@dataclass(frozen=True)
class Leg:
    """What one link carries of an exchange: ``members`` send ``bytes`` each, ``rounds`` latencies pass.

    ``part_of_node``: behind the link within, the group has several devices, but other groups have some, too.
    """

    link: int
    members: int
    bytes: float
    rounds: int
    part_of_node: bool = False


def legs(op: str, size: float, group: Group, device: Device) -> list[Leg]:
    """The parts of an exchange, by link from the innermost.

    Raises:
        UserError: no link of the device joins the group.
    """
    if group.size <= 1:
        return []
    if op in ONE_LINK:
        return [Leg(device.link_for(group.span), 2, size, 1)]
    if op in (ROUND, ROUND_AND_BACK):
        steps = (group.size - 1) if op == ROUND else 2 * group.size - 1
        return [Leg(device.link_for(group.span), 2, steps * size, steps)]
    found, inside, times = [], 1, 2 if op in TWICE else 1
    for number, link in enumerate(device.links):
        reach = group.size if link.devices is None else max(1, min(group.size, link.devices // group.stride))
        members = reach // inside
        if members > 1:
            outside = inside * (members - 1)  # ranks that this link is on the way to
            sent = size / group.size * outside if op in TO_EACH else size / inside * (members - 1) / members
            shared = inside > 1 and group.stride > 1
            found.append(Leg(number, members, times * sent, times, shared))
            inside *= members
        if inside >= group.size:
            return found
    device.link_for(group.span)
    return found


def leg_seconds(leg: Leg, device: Device) -> float:
    """Seconds of one leg."""
    link = device.links[leg.link]
    return leg.rounds * link.latency.value + leg.bytes / link.rate(leg.members, leg.part_of_node)


def exchange_seconds(op: str, size: float, group: Group, device: Device) -> float:
    """Seconds that an exchange of ``size`` bytes takes."""
    return sum(leg_seconds(leg, device) for leg in legs(op, size, group, device))
