"""Where in the source the operators and parameters of a model stand: by their path, from the graph of one small rank.

The compiler knows the lines of operators. A parameter's is found in the class of its cell: where ``__init__`` assigns it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mindllm.compiled.graph.sources import Sources
from mindllm.dry_run.moments import Use, place_of
from mindllm.errors import UserError
from mindllm.files import atomic_open

Lines = Mapping[str, str]
COPIES = re.compile(r"^(accu_grads|adam_[mv](?:_codes|_scales)?|muon_m)\.")  # of a weight, known by its name


def write_lines(sources: Sources, path: Path) -> None:
    """Write the lines of a graph as JSON."""
    with atomic_open(path) as file:
        json.dump(lines_by_place(sources), file)


def lines_by_place(sources: Sources) -> dict[str, str]:
    """``file:line`` of ``path/operator``; of ``path/`` the last line of a cell, or the one of a parameter."""
    lines: dict[str, str] = {}
    for scope, stack in sources.items():
        (path, operator), last = place_of(scope), stack[-1]
        name = Path(last.file).name
        lines.setdefault(f"{path}/{operator}", f"{name}:{last.line}")
        lines[f"{path}/"] = f"{name}:{last.line}"
        cell = scope.rpartition("/")[0].rpartition("-")[2]
        lines |= {f"{path}.{attribute}/": f"{name}:{line}" for attribute, line in _assigned(last.file, cell).items()}
    return lines


@cache
def _assigned(file: str, name: str) -> Mapping[str, int]:
    """Attributes that ``__init__`` of a class assigns, with their lines; nothing if the class is not in that file."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    cells = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    makers = (node for cell in cells for node in cell.body if getattr(node, "name", "") == "__init__")
    targets = (
        target
        for maker in makers
        for node in ast.walk(maker)
        if isinstance(node, ast.Assign)
        for target in node.targets
    )
    return {target.attr: target.lineno for target in targets if isinstance(target, ast.Attribute)}


def read_lines(path: Path) -> Lines:
    """What :func:`write_lines` wrote."""
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))
        return {str(place): str(where) for place, where in lines.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} holds no source lines: {error}") from None


def line_of(use: Use, lines: Lines) -> str:
    """The line of an operator, else of its cell; of a parameter; empty for what is in none, as what the compiler inserted."""
    if not use.operator:
        return lines.get(f"{COPIES.sub('', use.path)}/", "")
    return lines.get(f"{use.path}/{use.operator}") or lines.get(f"{use.path}/", "")
