"""Graphs of ranks of small runs, compiled once and kept beside what was simulated."""

from __future__ import annotations

from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.file import load, save
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import RunConfig
from mindllm.dry_run.cache import kept_file, read_kept


def kept_graph(config: RunConfig, rank: int) -> CompiledGraph:
    """Return the graph of a rank, compiled now where it is not kept.

    Raises:
        CompileFailed: the compiler's own error.
    """
    file = kept_file(config, rank, ".graph")
    graph = read_kept(file, load)
    if graph is None:
        graph = compile_rank(config, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        save(graph, file)
    return graph
