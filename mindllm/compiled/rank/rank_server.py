"""The process that compiles many ranks: ``python -m mindllm.compiled.rank.rank_server --config C.yaml --ranks 0,1 --output DIR``.

MindSpore's context is global, so a process compiles one rank. But the compiler is not told which one: it parses the model and
infers its types, which takes nearly half of the time and is the same for all ranks, and asks when it is about to cut the graph
into stages. There the process forks, and each of its children gets another answer. Ranks whose cells are not built alike, as
where the optimizer makes groups of ranks, are forked from the process that has imported MindSpore, before it is used; what the
first of them parsed, that process parses as well, and the forks after it find it done.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from mindllm.command import CommandParser, exit_code, run_command
from mindllm.compiled.device.fork import begin_threads, end_threads
from mindllm.compiled.device.front_end import environment
from mindllm.compiled.device.parsed_sources import read_parsed, write_parsed
from mindllm.compiled.rank.worker import compile_to, text_of_last_graph
from mindllm.config import RunConfig, load_config
from mindllm.jobs.cores import Core
from mindllm.jobs.environment import leave_job
from mindllm.jobs.process import die_with_parent
from mindllm.parallel.layout import mesh_of

LOG, PARSED = "log.txt", "parsed.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles ranks, ``--workers`` of them at a time, each into a directory of its own."""
    parser = CommandParser(
        prog="python -m mindllm.compiled.rank.rank_server",
        description="Compiles the training step of several ranks without a device.",
        epilog="example: python -m mindllm.compiled.rank.rank_server --config run.yaml --ranks 0,1,2,3 --output compiled/",
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--ranks", required=True, help="global ranks, separated by commas")
    parser.add_argument("--workers", type=int, default=1, help="ranks that are compiled at a time (default: 1)")
    parser.add_argument("--output", type=Path, required=True, help="receives a directory for each rank")
    parser.add_argument("--evaluation", action="store_true", help="compile what evaluates instead of the training step")
    options = parser.parse_args(arguments)
    die_with_parent()
    config = load_config(options.config)
    _import_once()
    job = Job(config, options.output, not options.evaluation, options.workers)
    compile_all(job, [int(rank) for rank in options.ranks.split(",")])
    return 0


@dataclass(frozen=True)
class Job:
    """What is compiled, the directory that has one for each rank, and how many ranks are compiled at a time."""

    config: RunConfig
    output: Path
    training: bool
    workers: int


def compile_all(job: Job, ranks: Sequence[int]) -> None:
    """Compiles ``ranks``, those that are built alike out of one process that goes as far as all of them go together."""
    from mindllm.train.distributed_step import cell_key

    alike: dict[Hashable, list[int]] = {}
    for rank in ranks:
        alike.setdefault(cell_key(job.config, rank), []).append(rank)
    for group in alike.values():
        if len(group) > 1 and not compile_each([group[0]], 1, partial(_start, job, group), partial(_learn, job.output)):
            return
    alone = [group[0] for group in alike.values() if len(group) == 1]
    compile_each(alone, job.workers, partial(_start, job, ()), partial(_learn, job.output))


def compile_each(
    ranks: Sequence[int], workers: int, start: Callable[[int], int], ended: Callable[[int, int], None]
) -> bool:
    """Starts a process for every rank, so many at a time, and waits for all; once one has failed, no other is started.

    ``start`` returns the id of the process; ``ended`` is told of every rank that is done, and its exit code, below 0 a signal.
    Returns whether none has failed.
    """
    waiting, failed = deque(ranks), False
    running: dict[int, int] = {}
    while running or (waiting and not failed):
        while waiting and len(running) < workers and not failed:
            rank = waiting.popleft()
            running[start(rank)] = rank
        process, status = os.wait()
        if process in running:
            failed |= status != 0
            ended(running.pop(process), os.waitstatus_to_exitcode(status))
    return not failed


def _import_once() -> None:
    """What every rank needs. Nothing of MindSpore may be used here: its threads would not survive a fork."""
    import mindllm.train.distributed_step  # noqa: F401


def _note(output: Path, rank: int, code: int) -> None:
    """Writes down which signal has ended a rank, that could not say it itself."""
    if code < 0:
        log = os.open(output / str(rank) / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, f"\nexit code {code}\n".encode())
        os.close(log)


def _learn(output: Path, rank: int, code: int) -> None:
    """Parses what a rank has parsed, for those that are forked from now on."""
    _note(output, rank, code)
    if (parsed := output / str(rank) / PARSED).is_file():
        read_parsed(parsed)


def _start(job: Job, alike: Sequence[int], rank: int) -> int:
    """Forks the process of a rank, and returns its id; of several that are built ``alike``, that of all of them."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _settle(job, rank)
        core = Core(keeper=True)
        asked = partial(_become_each, job, alike, core) if alike else None
        code = exit_code(lambda _: _compile(job, rank, asked))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    os.write(2, f"\nexit code {code}\n".encode())
    os._exit(code)


def _settle(job: Job, rank: int) -> None:
    """Makes this process that of ``rank``, which works and logs in a directory of its own."""
    directory = job.output / str(rank)
    directory.mkdir(parents=True, exist_ok=True)
    die_with_parent()
    log = os.open(directory / LOG, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(directory)
    leave_job()
    os.environ.update({**environment(rank, mesh_of(job.config).device_num), **text_of_last_graph(directory)})


def _compile(job: Job, rank: int, asked: Callable[[], int] | None) -> None:
    compile_to(job.config, rank, Path(), job.training, asked)
    write_parsed(Path(PARSED))


class _Forked(BaseException):
    """Raised in the process of a rank that was forked while MindSpore compiles."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def _become_each(job: Job, ranks: Sequence[int], core: Core) -> int:
    """Forks a process for every rank, in which this returns its number; the process that has called waits for all, and ends.

    Each waits for a core of its own when the caller has given back its ``core``.
    """

    def start(rank: int) -> int:
        process = os.fork()
        if process:
            return process
        raise _Forked(rank)

    try:
        end_threads()
        core.give_back()
        gc.freeze()  # forks need not search what lives as long as they do
        os._exit(0 if compile_each(ranks, job.workers, start, partial(_note, job.output)) else 1)
    except _Forked as forked:
        Core(keeper=True)
        begin_threads()
        _settle(job, forked.rank)
        return forked.rank
    except BaseException:  # MindSpore would go on with rank 0
        import traceback

        traceback.print_exc()
        _end(1)


if __name__ == "__main__":
    run_command(main)
