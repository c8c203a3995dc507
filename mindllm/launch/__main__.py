"""Runs a training script as several processes of this machine that train one model together."""

from __future__ import annotations

import argparse
import codecs
import random
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_directory, run_command
from mindllm.errors import UserError
from mindllm.launch.agent import Agent
from mindllm.launch.desk import RendezvousServer
from mindllm.launch.job import HOST, JOB, CrashedAtStart, Job, JobFailed, JobStopped
from mindllm.launch.msrun import MsrunJob, msrun_command
from mindllm.launch.script import command_of
from mindllm.launch.secret import Secret
from mindllm.terminal.console import error_console
from mindllm.terminal.text import visible

EXAMPLES = """example:
  %(prog)s --workers 2 "run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml \\
      --use_parallel true --parallel_config.data_parallel=2 --batch_size 8"

Every rank writes {log_dir}/worker_{rank}.log; what rank 0 writes is printed, too. When a rank fails, the others are ended and
the end of its log is printed. SIGTERM and Ctrl-C stop all ranks after the same step. The exit code is that of the command.
"""
STARTS = 6  # MindSpore 2.10 crashes now and then while its processes connect, the more often the busier the machine
MAXIMUM_PORT = 65535
SEVERAL_NODES_PORT = 8118  # as in MindFormers' script
FREE_PORTS = range(20000, 32000)


def make_parser(prog: str = "python -m mindllm.launch", script: str = "run_llm.py") -> CommandParser:
    """Return the parser of the command line; ``script`` is what its example starts."""
    parser = CommandParser(prog=prog, description=__doc__, epilog=EXAMPLES.replace("run_llm.py", script))
    parser.add_argument("command", help="the script, or a verb such as train, with its arguments, in quotes")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="number of processes, of all nodes")
    parser.add_argument("--local_workers", type=int, metavar="N", help="those of this node (default: all)")
    parser.add_argument("--master_addr", default=HOST, help="address of node 0, where it is reached by the others")
    parser.add_argument("--node_rank", type=int, default=0, metavar="N", help="number of this node (default: 0)")
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="port of node 0 on which they find each other; with several nodes the one after it is used, too, and the default is "
        f"{SEVERAL_NODES_PORT} (one node: a free one)",
    )
    parser.add_argument("--log_dir", type=output_directory, default="output/msrun_log", help="default: %(default)s")
    parser.add_argument(
        "--shared_dir",
        type=output_directory,
        metavar="DIR",
        help="directory of all nodes, for a file by which they know each other (default: the run's output_dir; of another "
        "program than run_llm.py the log directory)",
    )
    parser.add_argument(
        "--timeout", type=int, default=7200, help="seconds after which they give up finding each other (default: 7200)"
    )
    parser.add_argument(
        "--restart",
        type=int,
        default=0,
        metavar="N",
        help="a job that fails is started again, N times at most, from its last good checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--msrun", action="store_true", help="MindSpore's msrun starts the ranks, as it does on Ascend devices"
    )
    parser.add_argument("--check", action="store_true", help="only check what is given, and start nothing")
    return parser


def main(arguments: Sequence[str] | None = None, parser: CommandParser | None = None) -> int:
    """Start the job and wait for it."""
    options, rest = (parser or make_parser()).parse_known_args(arguments)
    if rest:
        quoted = f'"{options.command} {rest[0]} ..."'
        raise UserError(
            f"{rest[0]}: no such option; put the script and all its options in one pair of quotes: {quoted}"
        )
    command = command_of(options.command)
    refuse_impossible(options)
    if options.check:
        return 0
    local = options.local_workers = options.local_workers or options.workers
    if options.msrun or local == options.workers:
        return supervise(command, options, None)
    port = options.port or SEVERAL_NODES_PORT
    secret = Secret(options.shared_dir or shared_directory(command, options.log_dir), port)
    if options.node_rank:
        ranks = range(options.node_rank * local, (options.node_rank + 1) * local)
        address = (options.master_addr, port + 1)
        with Agent(command, address, options.node_rank, ranks, options.log_dir, options.timeout, secret, say) as agent:
            return agent.serve()
    free_port(port, options.master_addr)
    with RendezvousServer(options.master_addr, port, options.workers, local, options.timeout, secret, say) as desk:
        return supervise(command, argparse.Namespace(**{**vars(options), "port": port}), desk)


def say(text: str) -> None:
    """Print a line about the job on standard error."""
    error_console.print(text)


class Shown:
    """Prints what rank 0 writes; a terminal is shown control characters instead of obeying them."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def __call__(self, written: bytes) -> None:
        """Print what was written since the last call."""
        if sys.stdout.isatty():
            written = visible(self.decoder.decode(written)).encode()
        sys.stdout.buffer.write(written)
        sys.stdout.buffer.flush()


def refuse_impossible(options: argparse.Namespace) -> None:
    """Raises UserError for numbers that do not fit each other."""
    if options.workers < 1 or options.timeout < 1:
        raise UserError("the number of processes and the timeout must be at least 1")
    local = options.local_workers or options.workers
    if local < 1 or options.workers % local or not 0 <= options.node_rank < options.workers // local:
        raise UserError(
            f"{options.workers} workers, {local} on each node, node {options.node_rank}: workers must be a multiple of those of "
            "a node, and nodes are counted from 0"
        )
    if options.restart < 0:
        raise UserError(f"--restart {options.restart}: the number of restarts must be at least 0")
    if not 0 <= options.port <= MAXIMUM_PORT:
        raise UserError(f"{options.port} is not a port; ports are 1 to {MAXIMUM_PORT}")


def shared_directory(command: Sequence[str], log_dir: Path) -> Path:
    """The directory that all nodes of a job share: ``output_dir`` of our runs, and of another program where its logs go."""
    if Path(command[0]).name != "run_llm.py":
        return log_dir
    from mindllm.cli.run import read_config  # to read it takes a second, and one node needs none

    return Path(read_config(command[1:])[1].output_dir)


def supervise(command: Sequence[str], options: argparse.Namespace, desk: RendezvousServer | None) -> int:
    """Runs the job, and again as often as ``restart`` says while it fails."""
    variables = {JOB: secrets.token_hex(8)}
    for restart in range(1, options.restart + 1):
        try:
            return start_job(command, options, variables, desk)
        except JobFailed as failure:
            if isinstance(failure, JobStopped) or failure.exit_code == UserError.exit_code:
                raise
            told = f"{failure}\nrestart {restart} of {options.restart}: going on from the last good checkpoint"
            say(told)
    return start_job(command, options, variables, desk)


def start_job(
    command: Sequence[str], options: argparse.Namespace, variables: Mapping[str, str], desk: RendezvousServer | None
) -> int:
    """Runs the job once, with ranks that crash while they connect started again."""
    for _ in range(STARTS - 1):
        try:
            return run_job(command, options, variables, desk)
        except CrashedAtStart as crash:
            say(f"{crash}\nstarting the ranks again")
    return run_job(command, options, variables, desk)


def run_job(
    command: Sequence[str], options: argparse.Namespace, variables: Mapping[str, str], desk: RendezvousServer | None
) -> int:
    """Runs the ranks once."""
    if options.msrun:
        return run_msrun(command, options, variables)
    port = free_port(options.port, options.master_addr)
    with Job(command, options.workers, port, options.log_dir, options.timeout, variables, desk, Shown()) as job:
        return job.wait()


def run_msrun(command: Sequence[str], options: argparse.Namespace, variables: Mapping[str, str]) -> int:
    """Runs the ranks of this node once, by msrun."""
    first = options.node_rank * options.local_workers
    ranks = range(first, first + options.local_workers)
    composed = msrun_command(
        command,
        options.workers,
        options.local_workers,
        (options.master_addr, options.port or SEVERAL_NODES_PORT),
        options.node_rank,
        options.log_dir,
        options.timeout,
    )
    with MsrunJob(composed, ranks, options.log_dir, variables) as job:
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


if __name__ == "__main__":
    run_command(main)
