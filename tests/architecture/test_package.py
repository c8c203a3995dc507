"""``mindllm.architecture`` imports no other package, and no files import one another in a circle, lazily or not."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mindllm" / "architecture"


def module_of(path: Path) -> str:
    """Return the dotted name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for path in (ROOT / "mindllm").rglob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """Yield what a file imports at module level, lazily, and under ``TYPE_CHECKING``: the deepest modules named."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in FILES else str(node.module)


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that reach one another (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    groups: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        path.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
            if other in path:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            start = path.index(name)
            if len(path) - start > 1:
                groups.append({*path[start:]})
            del path[start:]

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return groups


def test_circles_of_a_graph():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [{"b", "c"}]


def test_the_architecture_imports_only_itself_and_errors():
    names = {name for path in PACKAGE.rglob("*.py") for name in imported(path)}
    assert {name for name in names if name.split(".")[0] in ("pydantic", "pydantic_core", "yaml", "mindspore")} == set()
    ours = {name for name in names if name.split(".")[0] == "mindllm"}
    assert {name for name in ours if not name.startswith(("mindllm.architecture.", "mindllm.errors"))} == set()


@pytest.mark.parametrize(
    "name", ["families", "families.hugging_face", "mindformers.reader", "config.reading.pretrained", "config"]
)
def test_each_package_that_reads_runs_can_be_imported_first(name):
    done = subprocess.run([sys.executable, "-c", f"import mindllm.{name}"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_files_import_one_another_in_a_circle():
    graph = {name: {one for one in imported(path) if one in FILES} - {name} for name, path in FILES.items()}
    assert circles(graph) == []
