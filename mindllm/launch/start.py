"""A job of several processes, on this node or several: started, and again where it may go on."""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mindllm.errors import UserError
from mindllm.launch.agent import Agent
from mindllm.launch.clusters.placement import Placement
from mindllm.launch.desk import RendezvousServer
from mindllm.launch.job import HOST, JOB, CrashedAtStart, Job, JobFailed, JobStopped
from mindllm.launch.layouts import LayoutBook
from mindllm.launch.msrun import MsrunJob, msrun_command
from mindllm.launch.secret import Secret

STARTS = 6  # MindSpore 2.10 crashes now and then while its processes connect, the more often the busier the machine
MAXIMUM_PORT = 65535
SEVERAL_NODES_PORT = 8118  # as in MindFormers' script
PATIENCE_SECONDS = 60.0
FREE_PORTS = range(20000, 32000)
Tell = Callable[[str], None]
Show = Callable[[bytes], None]
GoOn = Callable[[], None]


def unasked() -> None:
    """Let a job go on."""


@dataclass(frozen=True)
class Launch:
    """What is started.

    Attributes:
        command: a Python script and its arguments.
        workers: processes of all nodes.
        local_workers: those of this node.
        log_dir: a directory for a log of each rank.
        shared_dir: a directory of all nodes, for the file by which they know each other.
        master_addr: where node 0 is reached by the others.
        node_rank: the number of this node.
        port: of node 0, on which they find each other; 0: a free one, or of several nodes a fixed one.
        timeout: seconds after which they give up finding each other.
        restart: how often a job that fails is started again.
        msrun: MindSpore's msrun starts the ranks.
        msrun_log: a file for what msrun prints; None: the terminal.
        first_device: the device of this node's first rank; the others have those after it.
        job: a name that the job keeps when a scheduler starts it again; empty: it gets one of its own.
        book: layouts for fewer nodes, one of which ``command`` runs; ``workers`` may be more than any of them takes.
        patience: seconds for which a restart waits for nodes that were lost before it takes the layout for those that are there.
    """

    command: tuple[str, ...]
    workers: int
    local_workers: int
    log_dir: Path
    shared_dir: Path
    master_addr: str = HOST
    node_rank: int = 0
    port: int = 0
    timeout: int = 7200
    restart: int = 0
    msrun: bool = False
    msrun_log: Path | None = None
    first_device: int = 0
    job: str = ""
    book: LayoutBook | None = None
    patience: float = PATIENCE_SECONDS

    @property
    def has_other_nodes(self) -> bool:
        """Whether launchers of several nodes meet; msrun meets by itself."""
        return not self.msrun and self.local_workers != self.workers

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.node_rank * self.local_workers, (self.node_rank + 1) * self.local_workers)


def refuse_impossible(wanted: Launch) -> None:
    """Raises UserError for numbers that do not fit each other."""
    workers, local, node = wanted.workers, wanted.local_workers, wanted.node_rank
    if workers < 1 or wanted.timeout < 1:
        raise UserError("the number of processes and the timeout must be at least 1")
    if local < 1 or workers % local or not 0 <= node < workers // local:
        raise UserError(
            f"{workers} workers, {local} on each node, node {node}: workers must be a multiple of those of a node, and nodes are "
            "counted from 0"
        )
    if wanted.restart < 0:
        raise UserError(f"--restart {wanted.restart}: the number of restarts must be at least 0")
    if not 0 <= wanted.port <= MAXIMUM_PORT:
        raise UserError(f"--port: {wanted.port} is not a port; ports are 1 to {MAXIMUM_PORT}")
    if wanted.patience < 0:
        raise UserError(f"--patience {wanted.patience:g}: seconds to wait for lost nodes must be at least 0")
    if wanted.book is not None and wanted.book.fitting(workers, local) is None:
        known = ", ".join(map(str, sorted(wanted.book.layouts)))
        raise UserError(
            f"--book {wanted.book.path}: no layout for {workers} devices, {local} on each node; it has those for {known}"
        )


def in_layout(wanted: Launch) -> Launch:
    """Return ``wanted`` in the book's layout for its devices, where no launchers of several nodes agree on one.

    Raises:
        UserError: the command runs none of the book's layouts.
    """
    if wanted.book is None:
        return wanted
    devices = wanted.book.fitting(wanted.workers, wanted.local_workers)
    assert devices is not None, "refuse_impossible has been asked"
    return replace(wanted, command=tuple(wanted.book.command(wanted.command, devices)), workers=devices)


def placed(wanted: Launch, place: Placement) -> Launch:
    """Return ``wanted`` as a task of a job that a scheduler has started: its ranks, where task 0 is, and the job's name.

    Raises:
        UserError: the tasks cannot share the ranks evenly.
    """
    if wanted.book is not None:  # for the tasks that there are now, which may be fewer than at an earlier start
        wanted = replace(wanted, workers=place.tasks * (1 if place.shares_machines else wanted.book.node_devices))
    local = place.ranks_of_a_task(wanted.workers)
    wanted = replace(wanted, msrun=wanted.msrun and not place.shares_machines)  # msrun gives devices from 0 on
    if place.tasks == 1:
        return replace(wanted, local_workers=local, job=place.job)
    return replace(
        wanted,
        local_workers=local,
        master_addr=place.address,
        node_rank=place.task,
        port=wanted.port or place.port,
        first_device=place.first_device(local),
        job=place.job,
    )


def launch(wanted: Launch, tell: Tell, show: Show, go_on: GoOn = unasked) -> int:
    """Start this node's part of the job and wait for its end; return the code the job ended with.

    Args:
        wanted: what is started.
        tell: is given lines about the job.
        show: is given what rank 0 writes.
        go_on: is called while nodes wait for each other, and while msrun runs; what it raises ends the job.

    Raises:
        UserError: a port cannot be used, or another node was started otherwise.
        JobFailed: a rank failed, and no restart was left.
    """
    if not wanted.has_other_nodes:
        wanted = in_layout(wanted)
        if wanted.node_rank * wanted.local_workers >= wanted.workers:
            tell(f"node {wanted.node_rank} is a spare: the layout takes {wanted.workers} devices")
            return 0
        return supervise(wanted, None, tell, show, go_on)
    port, timeout = wanted.port or SEVERAL_NODES_PORT, wanted.timeout
    secret = Secret(wanted.shared_dir, port)
    if wanted.node_rank:
        address = (wanted.master_addr, port + 1)
        with Agent(
            wanted.command,
            address,
            wanted.node_rank,
            wanted.ranks,
            wanted.log_dir,
            timeout,
            secret,
            tell,
            wanted.first_device,
            wanted.book,
            go_on,
        ) as agent:
            return agent.serve()
    free_port(port, wanted.master_addr)
    with RendezvousServer(
        wanted.master_addr,
        port,
        wanted.workers,
        wanted.local_workers,
        timeout,
        secret,
        tell,
        wanted.book,
        wanted.patience,
    ) as desk:
        return supervise(replace(wanted, port=port), desk, tell, show, go_on)


def supervise(wanted: Launch, desk: RendezvousServer | None, tell: Tell, show: Show, go_on: GoOn = unasked) -> int:
    """Runs the job, and again as often as ``restart`` says while it fails."""
    variables = {JOB: wanted.job or secrets.token_hex(8)}
    for restart in range(1, wanted.restart + 1):
        try:
            return start_job(wanted, variables, desk, tell, show, go_on)
        except JobFailed as failure:
            if isinstance(failure, JobStopped) or failure.exit_code == UserError.exit_code:
                raise
            tell(f"{failure}\nrestart {restart} of {wanted.restart}: going on from the last good checkpoint")
    return start_job(wanted, variables, desk, tell, show, go_on)


def start_job(
    wanted: Launch,
    variables: Mapping[str, str],
    desk: RendezvousServer | None,
    tell: Tell,
    show: Show,
    go_on: GoOn = unasked,
) -> int:
    """Runs the job once, with ranks that crash while they connect started again."""
    for _ in range(STARTS - 1):
        try:
            return run_job(wanted, variables, desk, show, go_on)
        except CrashedAtStart as crash:
            tell(f"{crash}\nstarting the ranks again")
    return run_job(wanted, variables, desk, show, go_on)


def run_job(
    wanted: Launch, variables: Mapping[str, str], desk: RendezvousServer | None, show: Show, go_on: GoOn = unasked
) -> int:
    """Runs the ranks once."""
    if wanted.msrun:
        return run_msrun(wanted, variables, go_on)
    port = free_port(wanted.port, wanted.master_addr)
    with Job(
        wanted.command,
        wanted.workers,
        port,
        wanted.log_dir,
        wanted.timeout,
        variables,
        desk,
        show,
        wanted.first_device,
        wanted.book,
        go_on,
    ) as job:
        return job.wait()


def run_msrun(wanted: Launch, variables: Mapping[str, str], go_on: GoOn = unasked) -> int:
    """Runs the ranks of this node once, by msrun."""
    composed = msrun_command(
        wanted.command,
        wanted.workers,
        wanted.local_workers,
        (wanted.master_addr, wanted.port or SEVERAL_NODES_PORT),
        wanted.node_rank,
        wanted.log_dir,
        wanted.timeout,
    )
    with MsrunJob(composed, wanted.ranks, wanted.log_dir, variables, wanted.msrun_log, go_on) as job:
        return job.wait()


def free_port(wanted: int, host: str = HOST) -> int:
    """``wanted`` if nobody listens there on ``host``; for 0, one that is free now.

    That one is below those Linux gives to outgoing connections (32768 and more): MindSpore listens on it seconds later.
    """
    for port in [wanted] if wanted else random.sample(FREE_PORTS, len(FREE_PORTS)):
        reason = refusal(port, host)
        if not reason:
            return port
    raise UserError(f"port {port} cannot be used ({reason}); give another one, or none")


def refusal(port: int, host: str) -> str:
    """Why nobody can listen on a port; empty where one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
