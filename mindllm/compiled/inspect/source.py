"""Where a graph comes from: a configuration that is compiled, a kept graph, MindIR, or MindSpore's text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.file import load
from mindllm.compiled.graph.ir_text import read_ir_text
from mindllm.compiled.graph.mind_ir import parse_mind_ir
from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.outside import LARGEST_GRAPH, open_file, read_bytes
from mindllm.terminal.progress import Progress, unwatched

ZIP, TEXT = b"PK\x03\x04", b"# IR entry"
LAST_PASS = "*_validate_*.ir"
CANDIDATES = ("*.graph", LAST_PASS, "*.mindir", "rank_*/" + LAST_PASS)
BEGINNING = 4096


@dataclass(frozen=True)
class Inspected:
    """A graph, what to call it, and the run it was compiled from where that is known."""

    graph: CompiledGraph
    name: str
    config: RunConfig | None = None


def compile_run(config: RunConfig, rank: int, name: str = "run", progress: Progress = unwatched) -> Inspected:
    """Compile one rank of a run, which the graph is called after.

    Raises:
        UserError: it cannot be compiled.
    """
    from mindllm.compiled.rank.compile_rank import compile_rank

    progress(f"compiling rank {rank} of {name}", 0, 1)
    return Inspected(compile_rank(config, rank), f"{Path(name).name} rank {rank}", config)


def read_graph(path: Path) -> Inspected:
    """Read a graph of any kind, recognised by content; of a directory, the one it holds.

    Raises:
        UserError: there is none, there are several, or it is damaged.
    """
    file = _only_graph(path) if path.is_dir() else path
    rank = _rank(file)
    try:
        with open_file(file) as opened:
            beginning = opened.read(BEGINNING)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    if beginning.startswith(ZIP):
        return Inspected(load(file), file.name)
    if TEXT in beginning.replace(b"#IR entry", TEXT):
        return Inspected(read_ir_text(file, rank), file.name)
    try:
        return Inspected(parse_mind_ir(read_bytes(file, LARGEST_GRAPH), rank), file.name)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except UserError as error:
        raise UserError(f"{file}: neither a compiled graph, MindIR nor a text .ir of MindSpore ({error})") from None


def _only_graph(directory: Path) -> Path:
    for pattern in CANDIDATES:
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(str(file.relative_to(directory)) for file in found[:4])
            raise UserError(f"{directory}: holds {len(found)} graphs ({names} …); name one of them")
    raise UserError(f"{directory}: holds no graph ({', '.join(CANDIDATES[:3])})")


def _rank(path: Path) -> int:
    """MindSpore puts graphs of rank 3 into a directory ``rank_3``; without one, 0."""
    found = [int(match.group(1)) for part in path.absolute().parts if (match := re.fullmatch(r"rank_(\d+)", part))]
    return found[-1] if found else 0
