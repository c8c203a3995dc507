"""Which node of how many a command runs on: as its options say, or the scheduler of a cluster that has started it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from mindllm.command import port
from mindllm.launch.clusters.placement import Placement
from mindllm.launch.clusters.schedulers import placement_of
from mindllm.launch.start import HOST, SEVERAL_NODES_PORT, Launch, placed

OF_A_NODE = ("local_workers", "master_addr", "node_rank")  # options without which a scheduler is asked


def port_or_zero(text: str) -> int:
    """Return a TCP port, or 0 for a free one, as the type of an option."""
    return 0 if text == "0" else port(text)


def add_node_options(parser: ArgumentParser, timeout: int, ports: str = "the one after it is used") -> None:
    """Add the options by which several nodes find each other; ``timeout`` is their default, ``ports`` which are used beside."""
    parser.add_argument(
        "--local_workers",
        type=int,
        metavar="N",
        help="those of this node (default: all); in a task of Slurm or a pod it is known, as are address and number of the node",
    )
    parser.add_argument("--master_addr", help=f"address of node 0, where it is reached by the others (default: {HOST})")
    parser.add_argument("--node_rank", type=int, metavar="N", help="number of this node (default: 0)")
    parser.add_argument(
        "--port",
        "--master_port",
        type=port_or_zero,
        default=0,
        help=f"port of node 0 on which they find each other; with several nodes {ports}, too, and the default is "
        f"{SEVERAL_NODES_PORT} (one node: a free one)",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=timeout,
        help="seconds after which they give up finding each other (default: %(default)s)",
    )


def scheduled(options: Namespace) -> Placement | None:
    """Return the task of a scheduler that this process is; None where there is none, or options say which node this is.

    Raises:
        UserError: the scheduler says something that cannot be used.
    """
    return None if any(getattr(options, name) is not None for name in OF_A_NODE) else placement_of()


def on_this_node(wanted: Launch, options: Namespace, place: Placement | None) -> Launch:
    """Return ``wanted`` as the part of this node: by its options, or as the task ``place``.

    Raises:
        UserError: tasks cannot share the processes evenly.
    """
    here = replace(
        wanted,
        local_workers=options.local_workers or wanted.workers,
        master_addr=options.master_addr or HOST,
        node_rank=options.node_rank or 0,
        port=options.port,
        timeout=options.timeout,
    )
    return placed(here, place) if place else here
