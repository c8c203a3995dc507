"""The process that compiles many ranks: ``python -m mindllm.compiled.rank.rank_server --config C.yaml --ranks 0,1 --output DIR``.

MindSpore's context is global, so a process compiles one rank. Importing MindSpore takes as long as compiling a small graph:
this process imports it once and forks for every rank, before MindSpore has started any of its threads. What the first ranks
parsed, it parses as well, and the forks after it find it done.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mindllm.command import CommandParser, exit_code, run_command
from mindllm.compiled.device.front_end import environment
from mindllm.compiled.device.parsed_sources import read_parsed, write_parsed
from mindllm.compiled.rank.worker import compile_to, text_of_last_graph
from mindllm.config import RunConfig, load_config
from mindllm.launch.process import die_with_parent
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
    ranks = [int(rank) for rank in options.ranks.split(",")]
    compile_each(
        ranks,
        options.workers,
        partial(_start, config, options.output, not options.evaluation),
        partial(_learn, options.output),
    )
    return 0


def compile_each(
    ranks: Sequence[int], workers: int, start: Callable[[int], int], ended: Callable[[int], None] = lambda rank: None
) -> None:
    """Starts a process for every rank, so many at a time, and waits for all; once one has failed, no other is started.

    ``start`` returns the id of the process; ``ended`` is told of every rank that is done.
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
            ended(running.pop(process))


def _import_once() -> None:
    """What every rank needs. Nothing of MindSpore may be used here: its threads would not survive a fork."""
    import mindllm.train.distributed_step  # noqa: F401


def _learn(output: Path, rank: int) -> None:
    """Parses what a rank has parsed, for those that are forked from now on."""
    if (parsed := output / str(rank) / PARSED).is_file():
        read_parsed(parsed)


def _compile(config: RunConfig, rank: int, training: bool) -> None:
    compile_to(config, rank, Path(), training)
    write_parsed(Path(PARSED))


def _start(config: RunConfig, output: Path, training: bool, rank: int) -> int:
    """Forks the process of a rank, which works and logs in a directory of its own; returns its id."""
    directory = output / str(rank)
    directory.mkdir(parents=True)
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        die_with_parent()
        log = os.open(directory / LOG, os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(directory)
        devices = mesh_of(config).device_num
        os.environ.update({**environment(rank, devices), **text_of_last_graph(directory)})
        code = exit_code(lambda _: _compile(config, rank, training))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os.write(2, f"\nexit code {code}\n".encode())
        os._exit(code)


if __name__ == "__main__":
    run_command(main)
