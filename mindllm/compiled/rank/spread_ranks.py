"""Ranks compiled by the nodes of a Ray cluster, several by each piece of work, which imports MindSpore once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindllm.compiled.rank.host_needs import compile_bytes
from mindllm.compiled.rank.server_process import failure_of, graph_in, start_server
from mindllm.config import RunConfig, load_config, tree_of
from mindllm.executor.ray_cluster import Spread, Work
from mindllm.files import atomic_open
from mindllm.process.host_memory import free_memory
from mindllm.process.temporary import temporary_directory

TOGETHER = 8  # ranks of a piece, at most
FUNCTION = f"{__name__}:compile_some"


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
    """Ranks that the cluster compiles, as a process that puts their graphs into a directory."""

    def __init__(self, config: RunConfig, ranks: Sequence[int], training: bool, directory: Path) -> None:
        tree, memory = tree_of(config), compile_bytes(config)
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
