"""Runs a training script as several processes of this machine that train one model together."""

from __future__ import annotations

import argparse
import random
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_directory, run_command
from mindllm.console import error_console
from mindllm.errors import UserError
from mindllm.launch.job import HOST, CrashedAtStart, Job

EXAMPLES = """example:
  python -m mindllm.launch --workers 2 "run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml \\
      --use_parallel true --parallel_config.data_parallel=2 --batch_size 8"

Every rank writes {log_dir}/worker_{rank}.log; what rank 0 writes is printed, too. When a rank fails, the others are ended and
the end of its log is printed. SIGTERM and Ctrl-C stop all ranks after the same step. The exit code is that of the command.
"""
STARTS = 6  # MindSpore 2.10 crashes now and then while its processes connect, the more often the busier the machine
MAXIMUM_PORT = 65535
FREE_PORTS = range(20000, 32000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the job and waits for it."""
    parser = CommandParser(prog="python -m mindllm.launch", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("command", help="the script with its arguments, in quotes")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument("--port", type=int, default=0, help="port on which they find each other (default: a free one)")
    parser.add_argument("--log_dir", type=output_directory, default="output/msrun_log", help="default: %(default)s")
    parser.add_argument(
        "--timeout", type=int, default=7200, help="seconds after which they give up finding each other (default: 7200)"
    )
    options = parser.parse_args(arguments)
    command = shlex.split(options.command)
    if not command or (command[0].endswith(".py") and not Path(command[0]).is_file()):
        raise UserError(f'there is no script to run in "{options.command}"; write "run_llm.py --config FILE"')
    if options.workers < 1 or options.timeout < 1:
        raise UserError("the number of processes and the timeout must be at least 1")
    for _ in range(STARTS - 1):
        try:
            return run_job(command, options)
        except CrashedAtStart as crash:
            error_console.print(f"{crash}\nstarting the ranks again")
    return run_job(command, options)


def run_job(command: Sequence[str], options: argparse.Namespace) -> int:
    """Runs the job once."""
    with Job(command, options.workers, free_port(options.port), options.log_dir, options.timeout) as job:
        return job.wait()


def free_port(wanted: int) -> int:
    """``wanted`` if nobody listens there; for 0, one that is free now.

    That one is below those Linux gives to outgoing connections (32768 and more): MindSpore listens on it seconds later.
    """
    if not 0 <= wanted <= MAXIMUM_PORT:
        raise UserError(f"{wanted} is not a port; ports are 1 to {MAXIMUM_PORT}")
    for port in [wanted] if wanted else random.sample(FREE_PORTS, len(FREE_PORTS)):
        reason = refusal(port)
        if not reason:
            return port
    raise UserError(f"port {port} cannot be used ({reason}); give another one, or none")


def refusal(port: int) -> str:
    """Why nobody can listen on a port; empty where one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    run_command(main)
