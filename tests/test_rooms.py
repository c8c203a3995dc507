"""The rooms of the house import what the table of ``docs/architecture.md`` says, and nothing else."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from mindllm.cli.registry import VERBS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindllm"
DOORS = {"main", "api", "__init__", "__main__"}  # beside the rooms, and above them
MAY_PRINT = {"cli", "terminal", "main.py", "command.py"}  # the commands, what they print with, and what ends them
PRINTERS = ("mindllm.terminal.console", "mindllm.terminal.render")

SHARED = "shared by all"
SHARED_ROOMS: set[str] = set()


def rows() -> dict[str, tuple[str, ...]]:
    """Return, for every room of the table, the rooms that it may import."""
    found = {}
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and cells[1].startswith("`mindllm/") and cells[1].endswith("/`"):
            found[cells[1][9:-2]] = () if cells[3] in ("–", SHARED) else tuple(cells[3].split(", "))
            if cells[3] == SHARED:
                SHARED_ROOMS.add(cells[1][9:-2])
    return found


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


def room_of(name: str) -> str:
    """Return the room or shared module that a dotted name lies in."""
    return name.split(".")[1] if "." in name else "__init__"


ROOMS = rows()


@cache
def used() -> dict[str, set[tuple[str, str]]]:
    """Return, for every room and shared module, its files with the dotted names that each imports."""
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("__main__.py", "run_llm.py"):  # command lines
            room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
            found[room] |= {(str(path.relative_to(ROOT)), name) for name in imported(path)}
    return found


def test_the_table_names_every_room():
    assert set(ROOMS) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli" and room not in SHARED_ROOMS])
def test_a_room_imports_what_the_table_says(room):
    allowed = {*ROOMS[room], room}
    shared = {path.stem for path in PACKAGE.glob("*.py")} - DOORS | SHARED_ROOMS
    wrong = [
        (path, name)
        for path, name in sorted(used()[room])
        if name.startswith(("toolkit", "tests")) or room_of(name) not in allowed | shared
    ]
    unused = allowed - {room} - {room_of(name) for _, name in used()[room]}
    assert (wrong, unused) == ([], set())


def test_what_all_rooms_share_imports_no_room():
    shared = {path.stem for path in PACKAGE.glob("*.py")} - DOORS | SHARED_ROOMS
    wrong = [(path, name) for module in shared for path, name in used()[module] if room_of(name) not in shared]
    assert wrong == []


def test_no_command_imports_another():
    """Of two verbs neither knows the other: what they share is a file of its own."""
    commands = {verb.module for verb in VERBS.values()}
    pairs = {
        (path.removesuffix(".py").replace("/", "."), command)
        for path, name in used()["cli"]
        for command in commands
        if name == command or name.startswith(f"{command}.")
    }
    assert {(one, other) for one, other in pairs if one in commands and one != other} == set()


def test_the_library_does_not_print():
    """It calls back, yields and returns; its words go to people through mindllm/cli, or through logging."""
    found = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in MAY_PRINT
        and any(name.startswith(PRINTERS) for name in imported(path))
    ]
    assert found == []


def test_the_library_does_not_know_the_toolkit():
    assert [
        (path, name) for names in used().values() for path, name in names if name.startswith(("toolkit", "tests"))
    ] == []


def test_rooms_import_downwards():
    """Only config and families know each other: they read the same schema."""
    reading = {"config", "families"}
    below = {
        room: set(names) - (reading if room in reading else set()) for room, names in ROOMS.items() if room != "cli"
    }
    while below:
        ground = {room for room, names in below.items() if not names & set(below)}
        assert ground, f"rooms in a circle: {sorted(below)}"
        below = {room: names for room, names in below.items() if room not in ground}
