"""A pod of a job on Kubernetes: which of how many it is, as Volcano, the Ascend operator, or a rank table says.

Volcano's plugins ``env`` and ``svc`` set VC_TASK_INDEX and, for a task named worker, VC_WORKER_HOSTS. The Ascend operator sets
MS_WORKER_NUM, MS_LOCAL_WORKER, MS_NODE_RANK, MS_SCHED_HOST and MS_SCHED_PORT in the pods of an AscendJob whose label framework
is mindspore (MindCluster, "Ascend Operator environment variables").
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.launch.clusters.placement import Placement
from mindllm.outside import read_json

OPERATOR, VOLCANO, TABLE = "the Ascend operator", "Volcano", "the rank table"
JOB = "MINDLLM_JOB"  # which the manifest of a Volcano job sets to its name
PORT = 2222  # as the Ascend operator has it
DNS_SECONDS = 300.0  # for the name of a pod to be known, whose node may still load its image
OWN_ADDRESSES = ("POD_IP", "XDL_IP", "HOST_IP")  # what manifests of MindCluster say of a pod and its node
Find = Callable[[str], str]
COMPLETED = "completed"  # what a rank table says when all pods are there
WAIT_SECONDS = 600.0  # for all pods of the job
LOOK_SECONDS = 1.0
LARGEST = 1 << 26  # bytes of a rank table; 100,000 devices take a quarter of it
MOST_RANKS = 1 << 20


def pod_of_a_job(environment: Mapping[str, str], find: Find | None = None) -> Placement | None:
    """The pod that this process is in; None where nothing says that it is one of a job.

    ``find`` makes an address of the name of a pod.

    Raises:
        UserError: a variable, or the rank table, cannot be used; or the first pod cannot be found.
    """
    if "MS_NODE_RANK" in environment and "MS_LOCAL_WORKER" in environment:
        return _of_operator(environment)
    if "VC_TASK_INDEX" in environment and "VC_WORKER_HOSTS" in environment:
        return _of_volcano(environment, find or resolved)
    if environment.get("RANK_TABLE_FILE") and "RANK_ID" not in environment:
        return _of_table(environment)
    return None


def resolved(host: str, seconds: float = DNS_SECONDS) -> str:
    """The address of a name, which is waited for; raises UserError where it does not come to be known."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"{host}: the first pod of this job cannot be found by its name ({error})") from None
            time.sleep(1)


def _of_operator(environment: Mapping[str, str]) -> Placement:
    workers, local, node = (
        _number(environment, name, OPERATOR) for name in ("MS_WORKER_NUM", "MS_LOCAL_WORKER", "MS_NODE_RANK")
    )
    if not local or workers % local:
        raise UserError(
            f"MS_WORKER_NUM {workers} is no multiple of MS_LOCAL_WORKER {local}; all pods need as many devices"
        )
    address = environment.get("MS_SCHED_HOST", "")
    if not address:
        raise UserError(
            "MS_SCHED_HOST is missing in the environment; the Ascend operator sets it, for framework: mindspore"
        )
    task = environment.get("MINDX_TASK_ID", "")
    port = _number(environment, "MS_SCHED_PORT", OPERATOR)
    return Placement(OPERATOR, workers // local, node, 0, address, port, f"ascendjob-{task}" if task else "")


def _of_volcano(environment: Mapping[str, str], find: Find) -> Placement:
    pods = [host for host in environment["VC_WORKER_HOSTS"].split(",") if host]
    index = _number(environment, "VC_TASK_INDEX", VOLCANO)
    if index >= len(pods):
        raise UserError(
            f"VC_TASK_INDEX is {index}, but VC_WORKER_HOSTS names {len(pods)} pods; the pods of a run are one task, named worker"
        )
    address = find(pods[0]) if len(pods) > 1 else "127.0.0.1"
    return Placement(VOLCANO, len(pods), index, 0, address, PORT, environment.get(JOB, ""))


def _of_table(environment: Mapping[str, str]) -> Placement:
    path = environment["RANK_TABLE_FILE"]
    servers = read_rank_table(path)
    own = {environment[name] for name in OWN_ADDRESSES if environment.get(name)} or _addresses_here()
    found = [index for index, server in enumerate(servers) if own & server.addresses]
    if len(found) != 1:
        told = "no server is" if not found else "several servers are"
        raise UserError(
            f"{path}: server_list: {told} this one (value {', '.join(sorted(own))}); set POD_IP to the address that stands there"
        )
    return Placement(TABLE, len(servers), found[0], 0, servers[0].address, PORT)


def _addresses_here() -> set[str]:
    """The addresses that this machine's name has."""
    try:
        return set(socket.gethostbyname_ex(os.uname().nodename)[2])
    except OSError:
        return {"127.0.0.1"}


def _number(environment: Mapping[str, str], name: str, who: str) -> int:
    value = environment.get(name, "")
    if not (value.isascii() and value.isdecimal()):
        raise UserError(f"{name} is {value!r} in the environment, not a number; {who} sets it in the pods of a job")
    return int(value)


@dataclass(frozen=True)
class Server:
    """A server of the table: the ``addresses`` it has, the one it is reached at, and its ``ranks``, in order."""

    address: str
    addresses: frozenset[str]
    ranks: tuple[int, ...]


def read_rank_table(path: str | Path, seconds: float = WAIT_SECONDS) -> list[Server]:
    """Return the servers of a rank table of HCCL (1.0 and 1.2, MindCluster's ``hccl.json``), in the order of their ranks.

    It is waited for until it is completed, which it is when all pods are there.

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
