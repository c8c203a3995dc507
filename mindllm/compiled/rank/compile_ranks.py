"""The graphs of many ranks, compiled several at a time, and kept by content: the same step is compiled once.

Ranks of a stage have graphs that look alike up to rank numbers. Either all are compiled: that the numbers are the right ones is
part of what is to be proved. Or a few of each stage are, and the others are derived where the compiled ones show by what rule.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mindllm.cache import user_cache
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.file import load
from mindllm.compiled.rank.derived_ranks import NotDerivable, derived, sample_of
from mindllm.compiled.rank.host_needs import compile_bytes, require
from mindllm.compiled.rank.pool import Pool
from mindllm.compiled.rank.server_process import failure_of, graph_in, start_server
from mindllm.compiled.rank.worker import GRAPH
from mindllm.config import RunConfig, config_tree, load_config
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.jobs.cores import cores
from mindllm.jobs.memory import MemoryClaim, free_memory
from mindllm.jobs.ray_cluster import Spread, Work, is_spread
from mindllm.parallel.layout import mesh_of
from mindllm.process.temporary import make_temporary, remove_temporary, temporary_directory

KEPT_BYTES = 1 << 30
POLL_SECONDS = 0.05
Progress = Callable[[int], None]
"""Told of the number of ranks that are compiled."""
TOGETHER = 8  # ranks of a piece of work on a cluster, at most
FUNCTION = f"{__name__}:compile_some"  # which nodes of the cluster call


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
        self._kept = None if cache is None else cache / (_key(config) if training else f"{_key(config)}-evaluation")
        self._temporary = make_temporary("mindllm_ranks_")
        self._pool = Pool()
        self._free = free_memory()
        self._server: subprocess.Popen[bytes] | RanksOnCluster | None = None

    def __enter__(self) -> RankCompilation:
        missing = [rank for rank in self.ranks if not self._is_kept(rank)]
        if missing:
            if not is_spread():
                self._claim()
            self._server = self._start(missing)
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
        if isinstance(self._server, RanksOnCluster):
            self._server.kill()
        elif self._server is not None and self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
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
            if missing := [rank for rank in others if not self._is_kept(rank)]:
                self._server = self._start(missing)
            graphs |= self._compiled_graphs(progress)
        return [graphs[rank] for rank in self._all()]

    def _compiled_graphs(self, progress: Progress) -> dict[int, CompiledGraph]:
        """Waits for the ranks that are compiled, and reads each while others are compiled."""
        files: dict[int, Path] = {}
        graphs: dict[int, CompiledGraph | None] = {}
        running = True
        while running or len(graphs) < len(files):
            running = self._server is not None and self._server.poll() is None
            files |= {rank: self._keep(rank) for rank in self.ranks if rank not in files and self._is_done(rank)}
            progress(len(files))
            unread = next((rank for rank in files if rank not in graphs), None)
            if unread is not None:
                graphs[unread] = self._load(files[unread])
            elif running:
                time.sleep(POLL_SECONDS)
        if len(files) < len(self.ranks):
            raise self._failure([rank for rank in self.ranks if rank not in files])
        if damaged := [rank for rank, graph in graphs.items() if graph is None]:
            self._server = self._start(damaged)
            return self._compiled_graphs(progress)
        return {rank: graph for rank, graph in sorted(graphs.items()) if graph is not None}

    def _load(self, file: Path) -> CompiledGraph | None:
        """A graph; None, and the file is removed, where a kept one is damaged: it is compiled again."""
        try:
            return load(file, self._pool)
        except UserError:
            if self._kept is None or file.parent != self._kept:
                raise
            file.unlink(missing_ok=True)
            return None

    def _is_kept(self, rank: int) -> bool:
        return self._kept is not None and self._kept_file(rank).is_file()

    def _is_done(self, rank: int) -> bool:
        return self._is_kept(rank) or self._compiled(rank).is_file()

    def _kept_file(self, rank: int) -> Path:
        assert self._kept is not None
        return self._kept / f"rank_{rank}.graph"

    def _compiled(self, rank: int) -> Path:
        return self._temporary / str(rank) / GRAPH

    def _keep(self, rank: int) -> Path:
        """The file of a compiled rank; put into the cache at once if there is one, so that no interruption loses it."""
        if self._kept is None:
            return self._compiled(rank)
        if not self._is_kept(rank):
            self._kept.mkdir(parents=True, exist_ok=True)
            unfinished = self._kept / f".{os.getpid()}.{rank}"
            shutil.copyfile(self._compiled(rank), unfinished)
            unfinished.replace(self._kept_file(rank))
            with suppress(FileNotFoundError):  # another process forgets them, too
                _forget_oldest(self._kept)
        return self._kept_file(rank)

    def _failure(self, ranks: Sequence[int]) -> UserError:
        return failure_of(self._temporary, ranks, self._free)

    def _start(self, ranks: Sequence[int]) -> subprocess.Popen[bytes] | RanksOnCluster:
        if is_spread():
            return RanksOnCluster(self.config, ranks, self.training, self._temporary)
        return start_server(self.config, ranks, self.training, self._temporary, self.workers)


def compile_ranks(config: RunConfig, cache: Path | None = None, workers: int | None = None) -> list[CompiledGraph]:
    """The graphs of all ranks; errors as ``compile_rank``."""
    with RankCompilation(config, cache, workers) as compilation:
        return compilation.graphs()


def _key(config: RunConfig) -> str:
    from mindllm.train.compile_cache import step_key

    return step_key(config)


def _forget_oldest(kept: Path) -> None:
    """Deletes the directories that were made first until the rest is small enough; never ``kept`` itself."""
    directories = sorted(
        (path for path in kept.parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in directories}
    total = sum(sizes.values())
    for path in directories:
        if total <= KEPT_BYTES or path == kept:
            break
        shutil.rmtree(path, ignore_errors=True)
        total -= sizes[path]


def compile_some(tree: dict[str, Any], ranks: Sequence[int], training: bool) -> list[bytes]:
    """Compile ranks of the run in ``tree`` one after the other, and return their graphs as files hold them.

    Raises:
        UserError: why the first one that failed did.
    """
    free = free_memory()
    with temporary_directory("mindllm_ranks_") as directory:
        start_server(load_config(tree), ranks, training, directory, workers=1).wait()
        if missing := [rank for rank in ranks if not graph_in(directory, rank).is_file()]:
            raise failure_of(directory, missing, free)
        return [graph_in(directory, rank).read_bytes() for rank in ranks]


class RanksOnCluster:
    """Ranks that the nodes of a Ray cluster compile, as a process that puts their graphs into a directory.

    A piece of work has several of them, and imports MindSpore once for all.
    """

    def __init__(self, config: RunConfig, ranks: Sequence[int], training: bool, directory: Path) -> None:
        tree, memory = config_tree(config), compile_bytes(config)
        self._groups = [ranks[first : first + TOGETHER] for first in range(0, len(ranks), TOGETHER)]
        self._directory = directory
        self._spread = Spread(
            [
                Work(FUNCTION, (tree, list(group), training), f"compiling ranks {group[0]} to {group[-1]}", memory)
                for group in self._groups
            ]
        )

    def poll(self) -> int | None:
        """Take what is done; return 0 when nothing is left, None before."""
        for place, graphs in self._spread.done(0):
            for rank, content in zip(self._groups[place], graphs, strict=True):
                with atomic_open(graph_in(self._directory, rank), "wb") as file:
                    file.write(content)
        return None if self._spread.left else 0

    def kill(self) -> None:
        """End what is not done."""
        self._spread.kill()
