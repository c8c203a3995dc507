"""Where in the source the operators of a model stand: by path and operator, from the graph of one small rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mindllm.compiled.compile_rank import compile_rank
from mindllm.compiled.sources import Sources
from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.files import atomic_open
from toolkit.dry_run.moments import Use, place_of
from toolkit.dry_run.reduced import PLAIN, Point, reduced_run
from toolkit.dry_run.stages import ONLY, Run, Stage

Lines = Mapping[str, str]


def smallest_run(config: RunConfig) -> RunConfig:
    """A run on the devices of one stage with one layer: every operator of the model, each line of the source, once."""
    alone = Stage(0, 0, ONLY, (Run(0, PLAIN, 1),), 1)
    return reduced_run(config, alone, Point((1,), 1, 1))[0]


def write_lines(config: RunConfig, rank: int, path: Path) -> None:
    """Compiles the graph of ``rank`` and writes its lines as JSON."""
    with atomic_open(path) as file:
        json.dump(lines_by_place(compile_rank(config, rank).sources), file)


def lines_by_place(sources: Sources) -> dict[str, str]:
    """``path/operator`` -> ``file:line``, and for what has no line of its own ``path/`` -> the last one of the cell."""
    lines: dict[str, str] = {}
    for scope, stack in sources.items():
        path, operator = place_of(scope)
        where = f"{Path(stack[-1].file).name}:{stack[-1].line}"
        lines.setdefault(f"{path}/{operator}", where)
        lines[f"{path}/"] = where
    return lines


def read_lines(path: Path) -> Lines:
    """What :func:`write_lines` wrote."""
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))
        return {str(place): str(where) for place, where in lines.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} holds no source lines: {error}") from None


def line_of(use: Use, lines: Lines) -> str:
    """The line of the operator, else of its cell; empty for parameters and for what the compiler inserted."""
    if not use.operator:
        return ""
    return lines.get(f"{use.path}/{use.operator}") or lines.get(f"{use.path}/", "")
