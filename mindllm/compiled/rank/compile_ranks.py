"""The graphs of many ranks, compiled several at a time, and kept by content: the same step is compiled once.

Ranks of a stage have graphs that look alike up to rank numbers. Either all are compiled: that the numbers are the right ones is
part of what is to be proved. Or a few of each stage are, and the others are derived where the compiled ones show by what rule.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from mindllm.cache import user_cache
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.file import load
from mindllm.compiled.rank.compile_rank import GRAPH, PRELOAD, failure, failure_of, server_environment
from mindllm.compiled.rank.derived_ranks import NotDerivable, derived, sample_of
from mindllm.compiled.rank.host_needs import compile_bytes, require
from mindllm.compiled.rank.pool import Pool as SharedValues
from mindllm.compiled.rank.rank_group import RANK_CODE, group_ranks
from mindllm.config import RunConfig, load_config, tree_of
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.jobs.cores import cores
from mindllm.jobs.memory import MemoryClaim, free_memory
from mindllm.jobs.pool import Outcome, Pool, Task
from mindllm.jobs.ray_cluster import RayPool, is_spread
from mindllm.jobs.store import Store
from mindllm.jobs.worker import LOG
from mindllm.parallel.layout import mesh_of
from mindllm.parallel.refusals import CompileFailed
from mindllm.process.temporary import make_temporary, remove_temporary, temporary_directory

STORED_BYTES = 1 << 30
POLL_SECONDS = 0.05
Progress = Callable[[int], None]
"""Told of the number of ranks that are compiled."""
TOGETHER = 8  # ranks of a piece of work on a cluster, at most
FUNCTION, GROUP = f"{__name__}:compile_some", "mindllm.compiled.rank.rank_group:compile_group"


def cache_directory() -> Path:
    """Where compiled graphs are kept: ``$XDG_CACHE_HOME/mindllm/graphs``."""
    return user_cache("graphs")


class RankCompilation:
    """Compiling all ranks of a configuration in the background: begins with the block and ends with it at the latest.

    Args:
        cache: directory in which graphs are kept by content; None keeps none.
        workers: ranks at a time, at most; by default as many as there are cores. Fewer where memory does not suffice.
        training: the training step; otherwise what evaluates.
        every_rank: compile all; otherwise ranks are derived where that is shown to be right (``derived_ranks.py``).

    Attributes:
        ranks: that are compiled.
        derived: the others, once ``graphs`` has returned.
        refused: by stage, why its ranks could not be derived and were compiled.
    """

    def __init__(
        self,
        config: RunConfig,
        cache: Path | None = None,
        workers: int | None = None,
        training: bool = True,
        every_rank: bool = True,
    ) -> None:
        self.config = config
        self.training = training
        self.mesh = mesh_of(config)
        self.devices = self.mesh.device_num
        self.ranks = self._all() if every_rank else self._sample()
        self.derived: tuple[int, ...] = ()
        self.refused: dict[int, str] = {}
        self.workers = min(workers or cores(), self.devices)
        self._claims = ExitStack()
        self._store = None if cache is None else Store(cache, "ranks-", max_bytes=STORED_BYTES)
        key = _key(config) if training else f"{_key(config)}-evaluation"
        self._stored = None if self._store is None else self._store.path(key)
        self._temporary = make_temporary("mindllm_ranks_")
        self._values = SharedValues()
        self._free = free_memory()
        self._work: LocalRanks | RanksOnCluster | None = None

    def __enter__(self) -> RankCompilation:
        missing = [rank for rank in self.ranks if not self._is_stored(rank)]
        if missing:
            if not is_spread():
                self._claim()
            self._start(missing)
        return self

    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.devices))

    def _sample(self) -> tuple[int, ...]:
        stages = range(self.mesh.pipeline_stage)
        return tuple(rank for stage in stages for rank in sorted(sample_of(self.mesh, stage)))

    def _claim(self) -> None:
        """Claims memory for the ranks that are compiled at a time; refuses where there is none for a single one."""
        with ExitStack() as block:
            claim, one = block.enter_context(MemoryClaim()), compile_bytes(self.config)
            require(claim, self.config)
            self.workers = self.workers if claim.budget is None else min(self.workers, claim.budget // one)
            claim.take(self.workers * one)
            self._claims = block.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        if self._work is not None:
            self._work.kill()
        with self._claims:
            remove_temporary(self._temporary)

    def graphs(self, progress: Progress = lambda count: None) -> list[CompiledGraph]:
        """Waits for all ranks, and derives those that are not compiled.

        Raises:
            UserError, CompileFailed: as ``compile_rank``, for the first rank that does not compile.
        """
        compiled = self._compiled_graphs(progress)
        if len(compiled) == self.devices:
            return [compiled[rank] for rank in self._all()]
        graphs = dict(compiled)
        for stage in range(self.mesh.pipeline_stage):
            try:
                graphs |= derived(self.mesh, stage, compiled)
            except NotDerivable as reason:
                self.refused[stage] = str(reason)
        self.derived = tuple(rank for rank in sorted(graphs) if rank not in compiled)
        if others := [rank for rank in self._all() if rank not in graphs]:
            self.ranks = tuple(sorted([*self.ranks, *others]))
            if missing := [rank for rank in others if not self._is_stored(rank)]:
                self._start(missing)
            graphs |= self._compiled_graphs(progress)
        return [graphs[rank] for rank in self._all()]

    def _compiled_graphs(self, progress: Progress) -> dict[int, CompiledGraph]:
        """Waits for the ranks that are compiled, and reads each while others are compiled."""
        files: dict[int, Path] = {}
        graphs: dict[int, CompiledGraph | None] = {}
        running = True
        while running or len(graphs) < len(files):
            running = self._work is not None and self._work.poll()
            files |= {rank: self._store_graph(rank) for rank in self.ranks if rank not in files and self._is_done(rank)}
            progress(len(files))
            unread = next((rank for rank in files if rank not in graphs), None)
            if unread is not None:
                graphs[unread] = self._load(files[unread])
            elif running:
                time.sleep(POLL_SECONDS)
        if missing := [rank for rank in self.ranks if rank not in files]:
            raise CompileFailed(f"compiling rank {missing[0]} left no graph")
        if damaged := [rank for rank, graph in graphs.items() if graph is None]:
            self._start(damaged)
            return self._compiled_graphs(progress)
        return {rank: graph for rank, graph in sorted(graphs.items()) if graph is not None}

    def _load(self, file: Path) -> CompiledGraph | None:
        """Return a graph. If a stored one is damaged, remove it and return None: it is compiled again."""
        try:
            return load(file, self._values)
        except UserError:
            if self._stored is None or file.parent != self._stored:
                raise
            file.unlink(missing_ok=True)
            return None

    def _is_stored(self, rank: int) -> bool:
        return self._stored is not None and self._file(rank).is_file()

    def _is_done(self, rank: int) -> bool:
        return self._file(rank).is_file() or graph_in(self._temporary, rank).is_file()

    def _file(self, rank: int) -> Path:
        """Return the file of a graph: in the store if there is one."""
        return graph_in(self._temporary, rank) if self._stored is None else self._stored / f"rank_{rank}.graph"

    def _store_graph(self, rank: int) -> Path:
        """Return the file of a compiled rank, stored immediately so that no interruption loses it."""
        file = self._file(rank)
        if self._store is not None and not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_name(f".{os.getpid()}.{rank}")
            shutil.copyfile(graph_in(self._temporary, rank), unfinished)
            unfinished.replace(file)
            self._store.trim(file.parent)
        return file

    def _start(self, ranks: Sequence[int]) -> None:
        if is_spread():
            self._work = RanksOnCluster(self.config, ranks, self.training, self._temporary)
            return
        if not isinstance(self._work, LocalRanks):
            self._work = LocalRanks(self.config, self.training, self._temporary, self.workers)
        self._work.start(ranks)


def compile_ranks(config: RunConfig, cache: Path | None = None, workers: int | None = None) -> list[CompiledGraph]:
    """The graphs of all ranks; errors as ``compile_rank``."""
    with RankCompilation(config, cache, workers) as compilation:
        return compilation.graphs()


def _key(config: RunConfig) -> str:
    from mindllm.train.compile_cache import step_key

    return step_key(config)


def graph_in(directory: Path, rank: int) -> Path:
    """Return the file that receives the graph of a rank."""
    return directory / str(rank) / GRAPH


class LocalRanks:
    """Ranks that this machine compiles into a directory, ``workers`` at a time."""

    def __init__(self, config: RunConfig, training: bool, directory: Path, workers: int) -> None:
        self._config, self._training, self._directory, self._workers = config, training, directory, workers
        self._pool = Pool(workers, preload=PRELOAD, environment=server_environment())
        self._free = free_memory()

    def start(self, ranks: Sequence[int]) -> None:
        """Compile ``ranks``, those that are built alike in one task."""
        tree = tree_of(self._config)
        for group in group_ranks(self._config, ranks):
            arguments = (tree, group, self._training, self._workers, str(self._directory))
            slots = self._workers if len(group) > 1 else 1
            directory = self._directory / str(group[0])
            self._pool.submit(Task(f"compiling rank {group[0]}", GROUP, arguments, slots=slots, directory=directory))

    def poll(self) -> bool:
        """Return True while ranks are compiled; raise the error of one that has failed."""
        for outcome in self._pool.poll():
            if outcome.code != 0:
                raise self._failure(outcome)
        return self._pool.left > 0

    def kill(self) -> None:
        """Stop compiling."""
        self._pool.close()

    def _failure(self, outcome: Outcome) -> UserError:
        """Return the error of the first rank of a task that has failed, or else of the task itself."""
        for rank in outcome.task.arguments[1]:
            log, code = self._directory / str(rank) / LOG, self._directory / str(rank) / RANK_CODE
            if code.is_file() and (number := int(code.read_text(encoding="utf-8"))) != 0:
                text = log.read_text(encoding="utf-8", errors="replace")
                return failure(number, text, f"compiling rank {rank}", self._free)
        return failure_of(outcome, self._free)


def compile_some(tree: dict[str, Any], ranks: Sequence[int], training: bool) -> list[bytes]:
    """Compile ranks of the run in ``tree`` one after the other, and return their graphs as files hold them: a task of a node.

    Raises:
        UserError: the error of the first rank that failed.
    """
    with temporary_directory("mindllm_ranks_") as directory:
        work = LocalRanks(load_config(tree), training, directory, workers=1)
        try:
            work.start(ranks)
            while work.poll():
                time.sleep(POLL_SECONDS)
        finally:
            work.kill()
        return [graph_in(directory, rank).read_bytes() for rank in ranks]


class RanksOnCluster:
    """Ranks that the nodes of a Ray cluster compile; their graphs are written into a directory.

    A task has several ranks, for which MindSpore is imported once.
    """

    def __init__(self, config: RunConfig, ranks: Sequence[int], training: bool, directory: Path) -> None:
        tree, memory = tree_of(config), compile_bytes(config)
        self._directory, self._cluster = directory, RayPool()
        for first in range(0, len(ranks), TOGETHER):
            group = list(ranks[first : first + TOGETHER])
            name = f"compiling ranks {group[0]} to {group[-1]}"
            self._cluster.submit(Task(name, FUNCTION, (tree, group, training), memory=memory))

    def poll(self) -> bool:
        """Write the graphs that have arrived, and return True while some are missing."""
        for outcome in self._cluster.poll():
            for rank, content in zip(outcome.task.arguments[1], outcome.value, strict=True):
                with atomic_open(graph_in(self._directory, rank), "wb") as file:
                    file.write(content)
        return self._cluster.left > 0

    def kill(self) -> None:
        """Stop compiling."""
        self._cluster.close()
