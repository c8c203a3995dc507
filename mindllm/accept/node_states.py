"""What preflight says of a node, and of the way between it and node 0. Of it states leave the machine, by subject."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.launch.start import SEVERAL_NODES_PORT, Launch
from mindllm.preflight.finding import Finding
from mindllm.preflight.network import answer_nodes, ask_master, check_ports
from mindllm.preflight.node import check_devices, check_directory, check_host_memory
from mindllm.preflight.versions import check_versions

ASK_SECONDS = 60.0  # in which nodes that have met ask each other again, on the port of the runs
WORST_FIRST = ("no", "unknown", "good")


def node_states(place: Launch, here: int) -> list[tuple[str, str]]:
    """Look at this node; return the worst state by subject.

    Args:
        place: which node it is of how many, and the directory of the acceptance.
        here: Ascend devices that it has.
    """
    found: dict[str, str] = {}
    for finding in _look(place, here):
        states = (finding.state, found.get(finding.subject, finding.state))
        found[finding.subject] = min(states, key=WORST_FIRST.index)
    return [*found.items()]


def _look(place: Launch, here: int) -> Iterator[Finding]:
    yield from check_versions(here > 0)
    if here:
        yield from check_devices(min(place.local_workers, here))
    yield check_host_memory(place.local_workers)
    yield from check_directory(place.shared_dir)
    nodes, address = place.workers // place.local_workers, (place.master_addr, place.port or SEVERAL_NODES_PORT)
    if place.node_rank:
        yield from ask_master(*address, place.node_rank, place.shared_dir, ASK_SECONDS)
    elif nodes > 1:
        ports = [*check_ports(*address)]
        yield from ports
        if all(finding.state == "good" for finding in ports):
            yield from answer_nodes(*address, nodes, place.shared_dir, ASK_SECONDS)
