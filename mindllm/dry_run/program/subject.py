"""What a command line is about: its Python, and how many devices the YAML it names is written for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from mindllm.axes import AXES
from mindllm.config.reading.yaml_tree import read_yaml
from mindllm.errors import UserError
from mindllm.outside import LARGEST_YAML, read_text

LAUNCHERS = ("msrun", "mpirun", "mpiexec", "torchrun")
PYTHON = re.compile(r"python[0-9.]*$")


def python_of(command: Sequence[str]) -> str:
    """The interpreter a command runs: itself, that of a script it names first, or the one found as ``python``.

    Raises:
        UserError: the command cannot be started, or starts processes of its own.
    """
    name = Path(command[0]).name
    if name in LAUNCHERS:
        raise UserError(
            f"{command[0]} starts a process for each device; give the command of one of them, as: python train.py"
        )
    found = shutil.which(command[0])
    if found is None:
        raise UserError(f"{command[0]}: there is no such program")
    return found if PYTHON.match(name) else _interpreter(Path(found)) or _default()


def _interpreter(script: Path) -> str | None:
    """The Python in the first line of a script; None where that names another program."""
    with open(script, "rb") as file:
        first = file.readline(400).decode(errors="replace")
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    python = next((word for word in words if PYTHON.match(Path(word).name)), None)
    return shutil.which(python) if python else None


def _default() -> str:
    found = shutil.which("python") or shutil.which("python3")
    if found is None:
        raise UserError("no python is on the path; activate the environment of the program, or name it with --python")
    return found


def devices_of(command: Sequence[str]) -> int | None:
    """How many devices the YAML of MindFormers that a command names with ``--config`` is written for; None if it names none."""
    path = config_of(command)
    try:
        tree: Any = read_yaml(read_text(path, LARGEST_YAML), str(path)).data if path else None
    except (OSError, UserError):
        return None  # the program says it better
    sizes = tree.get("parallel_config") if isinstance(tree, dict) else None
    if not isinstance(sizes, dict) or tree.get("use_parallel") is False:
        return None
    devices = 1
    for axis in AXES:  # the product that MindFormers runs on
        value = sizes.get(axis.key)
        devices *= value if isinstance(value, int) and value > 0 else 1
    return devices


def config_of(command: Sequence[str]) -> Path | None:
    """The YAML that a command names with ``--config``, where there is such a file."""
    following = dict(pairwise(command))
    equal = next((word.partition("=")[2] for word in command if word.startswith("--config=")), None)
    named = equal or following.get("--config")
    if not named:
        return None
    beside = [Path(word).parent / named for word in command if word.endswith(".py")]  # as MindFormers looks for it
    return next((path for path in (Path(named), *beside) if path.is_file()), None)
