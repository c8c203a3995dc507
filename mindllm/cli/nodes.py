"""Nodes and ranks of commands that start several processes: node options, tasks of a scheduler, output of rank 0."""

from __future__ import annotations

import codecs
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import port
from mindllm.launch.clusters.placement import Placement
from mindllm.launch.clusters.schedulers import placement_of
from mindllm.launch.start import HOST, SEVERAL_NODES_PORT, Launch, launch, placed, refuse_impossible
from mindllm.terminal.console import error_console
from mindllm.terminal.text import visible

if TYPE_CHECKING:
    from mindllm.config import RunConfig

DEVICES = Path("/dev"), "davinci[0-9]*"  # on Ascend devices, MindSpore's msrun starts the ranks
LOGS = "launch_log"  # directory in output_dir for logs of ranks that tasks of a scheduler start
NODE_OPTIONS = ("local_workers", "master_addr", "node_rank")  # without them, the scheduler places this process


def port_or_zero(text: str) -> int:
    """Return a TCP port, or 0 for a free one, as the type of an option."""
    return 0 if text == "0" else port(text)


def add_node_options(parser: ArgumentParser, timeout: int, ports: str = "the next port") -> None:
    """Add the options by which several nodes connect; ``timeout`` is the default in seconds, ``ports`` those also in use."""
    parser.add_argument(
        "--local-workers",
        type=int,
        metavar="N",
        help="processes of this node (default: all); Slurm tasks and pods set this, --master-addr and --node-rank themselves",
    )
    parser.add_argument(
        "--master-addr", metavar="HOST", help=f"address of node 0 that other nodes connect to (default: {HOST})"
    )
    parser.add_argument("--node-rank", type=int, metavar="N", help="number of this node (default: 0)")
    parser.add_argument(
        "--port",
        "--master-port",
        type=port_or_zero,
        default=0,
        help=f"port of node 0; several nodes also use {ports} (default: {SEVERAL_NODES_PORT}; one node: a free port)",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=timeout,
        metavar="SECONDS",
        help="time limit for nodes to connect (default: %(default)s)",
    )


def scheduled(options: Namespace) -> Placement | None:
    """Return the scheduler task of this process; None without a scheduler, or if options place this node.

    Raises:
        UserError: the environment of the scheduler is invalid.
    """
    return None if any(getattr(options, name) is not None for name in NODE_OPTIONS) else placement_of()


def on_this_node(job: Launch, options: Namespace, task: Placement | None) -> Launch:
    """Return the part of a job on this node, from its options or its scheduler task.

    Raises:
        UserError: the processes do not divide evenly among tasks.
    """
    local = replace(
        job,
        local_workers=options.local_workers or job.workers,
        master_addr=options.master_addr or HOST,
        node_rank=options.node_rank or 0,
        port=options.port,
        timeout=options.timeout,
    )
    return placed(local, task) if task else local


def has_ascend_devices() -> bool:
    """Return True if this machine has Ascend devices."""
    directory, pattern = DEVICES
    return any(directory.glob(pattern))


def rank_task(config: RunConfig) -> Placement | None:
    """Return the scheduler task of this process if the tasks are to start the ranks of the run; else None."""
    from mindllm.launch.clusters.placement import is_rank
    from mindllm.train.job.execution import is_simulation

    parallel = config.parallel_config.device_num > 1 and config.run_mode in ("train", "finetune", "eval")
    task = placement_of() if parallel and not is_simulation() and not is_rank() else None
    return task if task and task.tasks > 1 else None


def start_ranks(config: RunConfig, task: Placement) -> int:
    """Start the ranks of this task with the command line of this process."""
    from mindllm.launch.script import own_command

    devices, output = config.parallel_config.device_num, Path(config.output_dir)
    msrun = has_ascend_devices() and not task.shares_machines
    command = tuple(own_command(sys.orig_argv, msrun))
    job = placed(Launch(command, devices, devices, output / LOGS, output, msrun=msrun), task)
    refuse_impossible(job)
    return launch(job, log_line, RankOutput())


def log_line(text: str) -> None:
    """Print a line about the job on standard error."""
    error_console.print(text)


class RankOutput:
    """Prints the output of rank 0, with control characters escaped on a terminal."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def __call__(self, data: bytes) -> None:
        """Print the output since the last call."""
        if sys.stdout.isatty():
            data = visible(self.decoder.decode(data)).encode()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
