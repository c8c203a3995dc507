"""Simulations as forks of one process, which has imported MindSpore and parsed the sources of the model for all of them.

Importing MindSpore and parsing take a fifth of a small simulation; what forks only read is in memory once.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mindllm.command import run_command
from mindllm.compiled.device.debug_information import can_leave_out_lines, leave_out_lines
from mindllm.compiled.device.front_end import environment
from mindllm.compiled.device.parsed_sources import read_parsed, write_parsed
from mindllm.compiled.device.stand_in import device_software
from mindllm.compiled.graph.sources import Sources
from mindllm.compiled.rank.worker import TEXT_DIRECTORY, sources_in, text_of_last_graph
from mindllm.compiled.rank.worker_process import failure, last_error
from mindllm.compiled.simulation.simulate_rank import ENVIRONMENT, product_of, rank_environment
from mindllm.compiled.simulation.simulate_worker import simulate
from mindllm.config import RunConfig
from mindllm.jobs.environment import allocation_variables, leave_job
from mindllm.jobs.memory import free_memory
from mindllm.jobs.process import die_with_parent
from mindllm.parallel.layout import mesh_of
from mindllm.parallel.refusals import CompileFailed

LOG, PARSED = "mindspore.log", "parsed.json"
POLL_SECONDS = 0.05


def server_environment() -> dict[str, str]:
    """Return what must be set before a process starts whose forks simulate; a UserError says that nothing can."""
    return {**ENVIRONMENT, **allocation_variables(), **device_software()}


def import_once() -> None:
    """Import what every rank needs. Nothing of MindSpore may be used here: its threads would not survive a fork."""
    import mindllm.train.distributed_step  # noqa: F401

    gc.freeze()  # forks need not search what lives as long as they do


def learn(parsed: Path) -> None:
    """Parse what an earlier simulation has parsed, if it left it, for those that are forked from now on."""
    if parsed.is_file():
        read_parsed(parsed)


def simulate_in_fork(
    config: RunConfig, rank: int, directory: Path, timeout: float, whole: bool = False, parsed: Path | None = None
) -> str:
    """Simulate ``rank`` in a fork of this process inside ``directory``; return what it printed.

    Args:
        whole: compile the layers of other stages as they are.
        parsed: receives what has been parsed, for :func:`learn`.

    Raises:
        UserError: what is wrong with the user's input.
        CompileFailed: MindSpore's own error, too little memory, or more than ``timeout`` seconds.
    """
    output = _in_fork(config, rank, directory, {}, parsed, f"simulating rank {rank}", timeout, whole)
    if not (directory / product_of(rank)).is_file():
        raise CompileFailed(f"simulating rank {rank} left no {product_of(rank)}:\n{last_error(output)}")
    return output


def sources_in_fork(config: RunConfig, rank: int, directory: Path, timeout: float, parsed: Path) -> Sources:
    """Return the source lines of the operators of ``rank``, whose graph a fork compiles with the front end only.

    Raises what :func:`simulate_in_fork` raises.
    """
    variables = {**environment(rank, mesh_of(config).device_num), **text_of_last_graph(directory)}
    _in_fork(config, rank, directory, variables, parsed, f"compiling rank {rank}", timeout, lines=True)
    return sources_in(Path(variables[TEXT_DIRECTORY]) / f"rank_{rank}")


def _in_fork(
    config: RunConfig,
    rank: int,
    directory: Path,
    variables: Mapping[str, str],
    parsed: Path | None,
    doing: str,
    timeout: float,
    whole: bool = False,
    lines: bool = False,
) -> str:
    """Return what a fork printed that compiled a rank; one that is refused compiles again, whole, with ``lines`` for places.

    Where that is not refused, the last line says what was.
    """
    log, free = directory / LOG, free_memory()

    def main() -> None:
        gc.disable()  # the fork ends before its garbage matters, and looking for it takes time
        os.environ.update(rank_environment(config, rank))
        os.chdir(directory)
        if not lines and can_leave_out_lines(config):
            leave_out_lines()
        simulate(config, rank, whole)
        if parsed is not None:
            write_parsed(parsed)

    code = wait_for(fork(main, log, variables), timeout)
    if code is None:
        raise CompileFailed(f"{doing} took longer than {timeout:.0f} s")
    if code > 0 and not lines:
        refused = last_error(log.read_text(encoding="utf-8", errors="replace")).partition("\n[")[0]
        log.unlink(missing_ok=True)
        output = _in_fork(config, rank, directory, variables, parsed, doing, timeout, whole=True, lines=True)
        return f"{output}\ncompiled twice, the second time with lines of the source: {' '.join(refused.split())}"
    output = log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        raise failure(code, output, doing, free)
    return output


def fork(main: Callable[[], None], log: Path, variables: Mapping[str, str] | None = None) -> int:
    """Return the id of a fork that runs ``main``, writes into ``log``, and ends with this process at the latest."""
    process = os.fork()
    if process:
        return process
    try:
        die_with_parent()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        leave_job()
        os.environ.update(variables or {})
        run_command(lambda _: main())
    finally:  # never back into the caller's code
        os._exit(1)


def wait_for(process: int, timeout: float) -> int | None:
    """Return the exit code of a fork, negative the signal that killed it; None after ``timeout`` seconds, when it is killed."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None
