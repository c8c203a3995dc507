"""Packages import only what the table of ``docs/architecture.md`` allows."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from mindllm.cli.registry import VERBS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindllm"
ENTRY_POINTS = {"main", "api", "__init__", "__main__"}  # may import every package
MAY_PRINT = {"cli", "terminal", "main.py", "command.py"}  # commands, and what they print and exit with
PRINTERS = ("mindllm.terminal.console", "mindllm.terminal.render")

SHARED = "shared by all"
SHARED_PACKAGES: set[str] = set()


def rows() -> dict[str, tuple[str, ...]]:
    """Return the packages of the table, and those that each may import."""
    table = {}
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and cells[1].startswith("`mindllm/") and cells[1].endswith("/`"):
            table[cells[1][9:-2]] = () if cells[3] in ("–", SHARED) else tuple(cells[3].split(", "))
            if cells[3] == SHARED:
                SHARED_PACKAGES.add(cells[1][9:-2])
    return table


@cache
def imported(path: Path) -> set[str]:
    """Return the dotted names of mindllm that a file imports: at module level, lazily, and for types alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("mindllm", "toolkit", "tests")}


def package_of(name: str) -> str:
    """Return the package or shared module of a dotted name."""
    return name.split(".")[1] if "." in name else "__init__"


PACKAGES = rows()


@cache
def used() -> dict[str, set[tuple[str, str]]]:
    """Return, by package and shared module, pairs of a file and a dotted name that it imports."""
    imports = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("__main__.py", "run_llm.py"):  # command lines
            package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
            imports[package] |= {(str(path.relative_to(ROOT)), name) for name in imported(path)}
    return imports


def test_the_table_names_every_package():
    assert set(PACKAGES) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


@pytest.mark.parametrize(
    "package", [package for package in PACKAGES if package != "cli" and package not in SHARED_PACKAGES]
)
def test_a_package_imports_what_the_table_allows(package):
    allowed = {*PACKAGES[package], package}
    shared = {path.stem for path in PACKAGE.glob("*.py")} - ENTRY_POINTS | SHARED_PACKAGES
    wrong = [
        (path, name)
        for path, name in sorted(used()[package])
        if name.startswith(("toolkit", "tests")) or package_of(name) not in allowed | shared
    ]
    unused = allowed - {package} - {package_of(name) for _, name in used()[package]}
    assert (wrong, unused) == ([], set())


def test_shared_modules_import_no_package():
    shared = {path.stem for path in PACKAGE.glob("*.py")} - ENTRY_POINTS | SHARED_PACKAGES
    wrong = [(path, name) for module in shared for path, name in used()[module] if package_of(name) not in shared]
    assert wrong == []


def test_no_command_imports_another():
    """No verb imports another. Shared code is a separate file."""
    commands = {verb.module for verb in VERBS.values()}
    pairs = {
        (path.removesuffix(".py").replace("/", "."), command)
        for path, name in used()["cli"]
        for command in commands
        if name == command or name.startswith(f"{command}.")
    }
    assert {(one, other) for one, other in pairs if one in commands and one != other} == set()


def test_the_library_does_not_print():
    """The library calls back, yields, returns and logs. Only mindllm/cli prints."""
    printing = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in MAY_PRINT
        and any(name.startswith(PRINTERS) for name in imported(path))
    ]
    assert printing == []


def test_the_library_does_not_know_the_toolkit():
    assert [
        (path, name) for names in used().values() for path, name in names if name.startswith(("toolkit", "tests"))
    ] == []


def test_imports_have_no_circles():
    """Only config and families import each other."""
    reading = {"config", "families"}
    pending = {
        package: set(names) - (reading if package in reading else set())
        for package, names in PACKAGES.items()
        if package != "cli"
    }
    while pending:
        leaves = {package for package, names in pending.items() if not names & set(pending)}
        assert leaves, f"packages in an import circle: {sorted(pending)}"
        pending = {package: names for package, names in pending.items() if package not in leaves}
