"""The rank table of HCCL, version 1.0 and 1.2: which servers a job has, with which devices, and which ranks these are.

MindCluster writes it as ``hccl.json``; its ``status`` is ``completed`` when all pods are there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.outside import read_json

COMPLETED = "completed"
WAIT_SECONDS = 600.0  # for all pods of the job
LOOK_SECONDS = 1.0
LARGEST = 1 << 26  # bytes; 100,000 devices take a quarter of it
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Server:
    """A server of the table: the ``addresses`` it has, the one it is reached at, and its ``ranks``, in order."""

    address: str
    addresses: frozenset[str]
    ranks: tuple[int, ...]


def read_rank_table(path: str | Path, seconds: float = WAIT_SECONDS) -> list[Server]:
    """Return the servers of a rank table, in the order of their ranks; waits until it is completed.

    Raises:
        UserError: it does not come to be completed, is no rank table, or servers differ in their number of ranks, of which each
            has those after the ones of the server before it.
    """
    deadline = time.monotonic() + seconds
    while True:
        table = _table(Path(path))
        status = table.get("status")
        if status == COMPLETED:
            return _servers(table, path)
        if time.monotonic() > deadline:
            raise UserError(
                f"{path}: status: the rank table is not complete after {seconds:.0f} s (value {status!r}); look at the job's pods"
            )
        time.sleep(LOOK_SECONDS)


def _table(path: Path) -> Mapping[str, Any]:
    table = read_json(path, LARGEST)
    if not isinstance(table, dict):
        raise _no_table(path)
    return table


def _servers(table: Mapping[str, Any], path: str | Path) -> list[Server]:
    try:
        found = [_server(entry) for entry in table["server_list"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _no_table(path) from None
    servers = sorted(found, key=lambda server: server.ranks)
    counts = {len(server.ranks) for server in servers}
    ranks = [rank for server in servers for rank in server.ranks]
    if len(counts) != 1 or ranks != list(range(len(ranks))):
        raise UserError(
            f"{path}: server_list: ranks are not 0, 1, 2, ... with as many on each server; give every pod as many devices"
        )
    return servers


def _server(entry: Mapping[str, Any]) -> Server:
    ranks = tuple(sorted(int(device["rank_id"]) for device in entry["device"]))
    if not ranks or ranks[-1] >= MOST_RANKS:
        raise ValueError("no ranks")
    known = [entry.get(name) for name in ("container_ip", "host_ip", "server_id")]
    addresses = [str(address) for address in known if address]
    if not addresses:
        raise ValueError("a server without an address")
    return Server(addresses[0], frozenset(addresses), ranks)


def _no_table(path: str | Path) -> UserError:
    return UserError(
        f"{path}: server_list: is no rank table with servers, their devices and rank_id; RANK_TABLE_FILE names it"
    )
