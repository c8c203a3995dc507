"""Ranks that one process compiles together, as far as they have everything in common.

The compiler is not told which rank it compiles: it parses the model and infers its types, which takes nearly half of the time and
is equal for all ranks, and asks for the rank when it is about to cut the graph into stages. At that point the process forks, and
each fork gets another answer. Ranks whose cells are built differently, such as those with their own optimizer groups, do not
share a process.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.tuners import ADALORA, GALORE, LISA
from mindllm.compiled.device.fork import begin_threads, end_threads
from mindllm.compiled.device.front_end import environment
from mindllm.compiled.device.parsed_sources import write_parsed
from mindllm.compiled.rank.compile_rank import PARSED, compile_to, text_of_last_graph
from mindllm.config import RunConfig, load_config
from mindllm.jobs.cores import Core
from mindllm.jobs.process import die_with_parent
from mindllm.jobs.worker import LOG, redirect_output
from mindllm.parallel.layout import mesh_of
from mindllm.process.exit_hooks import skip_exit_functions

RANK_CODE = "rank.code"  # file with the exit code of a forked rank


def group_ranks(config: RunConfig, ranks: Sequence[int]) -> list[list[int]]:
    """Return ``ranks`` in groups whose cells are built alike, large groups first."""
    groups: dict[Hashable, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_cell_key(config, rank), []).append(rank)
    return sorted(groups.values(), key=lambda group: len(group) == 1)


def _cell_key(config: RunConfig, rank: int) -> Hashable:
    """Return what the cells of ``rank`` depend on."""
    pet, architecture = config.model.config.pet_config, config.model.config.architecture
    has_own_groups = config.parallel_config.passes_keys or any(
        isinstance(spec.feed_forward, ExpertsSpec) and spec.feed_forward.grouped for spec in architecture.layers
    )
    has_own_update = config.optimizer.needs_cuts or (pet is not None and pet.tuner.name in (ADALORA, GALORE, LISA))
    if has_own_update or has_own_groups or config.parallel.strategy_ckpt_save_file:
        return rank
    # The last stage has a second copy of the embedding.
    uses_embedding_twice = architecture.head.tied or any(spec.is_mtp for spec in architecture.layers)
    return uses_embedding_twice and mesh_of(config).stage_of(rank) == config.last_stage


@dataclass(frozen=True)
class Group:
    """Ranks that are built alike, how many of them compile at a time, and the directory with a subdirectory per rank."""

    config: RunConfig
    ranks: Sequence[int]
    training: bool
    workers: int
    output: Path


def compile_group(tree: dict[str, Any], ranks: Sequence[int], training: bool, workers: int, output: str) -> None:
    """Compile ranks that are built alike, each into a subdirectory of ``output``: a task."""
    run_group(Group(load_config(tree), ranks, training, workers, Path(output)))


def run_group(group: Group) -> None:
    """Compile as the first rank of a group; at the point where its ranks differ, fork a process per rank."""
    _enter(group, group.ranks[0])
    core = Core(keeper=True)
    choose_rank = partial(_fork_ranks, group, core) if len(group.ranks) > 1 else None
    compile_to(group.config, group.ranks[0], Path(), group.training, choose_rank)
    write_parsed(Path(PARSED))
    skip_exit_functions()


def _enter(group: Group, rank: int) -> None:
    """Make this process that of ``rank``, which works and logs in a directory of its own."""
    directory = group.output / str(rank)
    directory.mkdir(parents=True, exist_ok=True)
    redirect_output(directory / LOG)
    os.chdir(directory)
    os.environ.update({**environment(rank, mesh_of(group.config).device_num), **text_of_last_graph(directory)})


class _Forked(BaseException):
    """Raised in the process of a rank that was forked while MindSpore compiles."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def _fork_ranks(group: Group, core: Core) -> int:
    """Fork a process per rank, in which this returns the rank. The calling process waits for all of them and ends.

    Each fork waits for a core of its own, after the caller has given back its ``core``.
    """

    def start(rank: int) -> int:
        process = os.fork()
        if process:
            return process
        raise _Forked(rank)

    def write_code(rank: int, code: int) -> None:
        (group.output / str(rank) / RANK_CODE).write_text(str(code), encoding="utf-8")

    try:
        end_threads()
        core.give_back()
        gc.freeze()  # forks need not search what lives as long as they do
        os._exit(0 if run_forks(group.ranks, group.workers, start, write_code) else 1)
    except _Forked as forked:
        die_with_parent()
        Core(keeper=True)
        begin_threads()
        _enter(group, forked.rank)
        return forked.rank
    except BaseException:  # MindSpore would go on with the first rank
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def run_forks(
    ranks: Sequence[int], workers: int, start: Callable[[int], int], on_end: Callable[[int, int], None]
) -> bool:
    """Start a process per rank, ``workers`` at a time, and wait for all. Once one has failed, no other is started.

    Args:
        start: starts a process and returns its id.
        on_end: receives a rank and its exit code, or minus the number of the signal that killed it.

    Returns:
        True if none has failed.
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
            on_end(running.pop(process), os.waitstatus_to_exitcode(status))
    return not failed
