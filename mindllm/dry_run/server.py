"""The process whose forks simulate: ``python -m mindllm.dry_run.server --connection 5``, started by :class:`Server`.

It imports MindSpore once, and learns from each simulation what MindSpore's parser made of the sources. A simulation is two forks:
one that waits, reads what MindSpore left and writes the profile, and below it the one that MindSpore takes for a rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.compiled.simulation.forked import (
    PARSED,
    fork,
    import_once,
    learn,
    server_environment,
    simulate_in_fork,
    sources_in_fork,
)
from mindllm.compiled.simulation.simulate_rank import simulate_rank
from mindllm.config import load_config
from mindllm.dry_run.profile import profile_of, save_profile
from mindllm.dry_run.source_lines import write_lines
from mindllm.files import atomic_open
from mindllm.jobs.cores import Core
from mindllm.jobs.process import JobProcess
from mindllm.process.exit_hooks import skip_exit_functions
from mindllm.sources import python_path

CONFIG, LOG, CODE = "config.yaml", "log", "code"
POLL_SECONDS, LONGEST = 0.05, 3600.0


class Server:
    """The server as its client sees it, which kills the process when it is done with it.

    Args:
        directory: for its log and temporary files.
    """

    def __init__(self, directory: Path) -> None:
        self._requests, theirs = socket.socketpair()
        command = [sys.executable, "-m", "mindllm.dry_run.server", "--connection", str(theirs.fileno())]
        variables = {**server_environment(), "PYTHONPATH": python_path(), "COLUMNS": "1000"}
        with theirs:
            self.process = JobProcess("the server of simulations", command, variables, directory / "server.log", theirs)

    def begin(self, directory: Path, rank: int, output: Path, lines: bool) -> None:
        """Begin to simulate ``rank`` of the configuration in ``directory``, which also receives log and exit code.

        Args:
            output: receives the profile, or with ``lines`` the source lines of the operators.
        """
        request = json.dumps({"directory": str(directory), "rank": rank, "output": str(output), "lines": lines})
        self._requests.sendall(f"{request}\n".encode())

    def kill(self) -> None:
        """End the process with all that it has forked."""
        self._requests.close()
        self.process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates what the connection asks for until it ends."""
    parser = CommandParser(
        prog="python -m mindllm.dry_run.server",
        description="Simulates ranks for the dry run, as another process asks for them.",
        epilog="example: python -m mindllm.dry_run.server --connection 5",
    )
    parser.add_argument(
        "--connection", type=int, required=True, help="file descriptor of a socket that brings requests"
    )
    options = parser.parse_args(arguments)
    import_once()
    with socket.socket(fileno=options.connection) as connection:
        _serve(connection)
    skip_exit_functions()
    return 0


def _serve(connection: socket.socket) -> None:
    connection.settimeout(POLL_SECONDS)
    received, running = b"", dict[int, Path]()
    while True:
        try:
            new = connection.recv(1 << 16)
            if not new:
                return
            received += new
        except TimeoutError:
            pass
        *lines, received = received.split(b"\n")
        for line in lines:
            request = json.loads(line)
            directory = Path(request["directory"])
            job = partial(_work, directory, request["rank"], Path(request["output"]), request["lines"])
            running[fork(job, directory / LOG, {"TMPDIR": str(directory)})] = directory
        _note_ended(running)


def _note_ended(running: dict[int, Path]) -> None:
    """Write the exit codes of jobs that have ended, and parse what they have parsed."""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        directory = running.pop(process)
        with atomic_open(directory / CODE) as file:
            file.write(str(os.waitstatus_to_exitcode(status)))
        learn(directory / PARSED)


def _work(directory: Path, rank: int, output: Path, lines: bool) -> None:
    """Simulate a rank and write its profile, or find its source lines and write those."""
    tempfile.tempdir = str(directory)
    Core()
    try:
        config = load_config(directory / CONFIG)
        if lines:
            write_lines(sources_in_fork(config, rank, directory, LONGEST, directory / PARSED), output)
        else:
            run_process = partial(simulate_in_fork, parsed=directory / PARSED)
            save_profile(profile_of(simulate_rank(config, rank, run_process=run_process)), output)
    finally:
        skip_exit_functions()  # of MindSpore, which this process has only imported


if __name__ == "__main__":
    run_command(main)
