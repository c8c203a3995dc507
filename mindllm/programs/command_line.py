"""The command line of a program: its interpreter, and the devices for which its YAML is written."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mindllm.axes import AXES
from mindllm.compiled.device.wheel import Wheel, wheel_of
from mindllm.config.reading.yaml_tree import read_yaml
from mindllm.errors import UserError
from mindllm.outside import LARGEST_YAML, read_text

LAUNCHERS = ("msrun", "mpirun", "mpiexec", "torchrun")
PYTHON = re.compile(r"python[0-9.]*$")
FIRST_LINE = 400  # bytes


@dataclass(frozen=True)
class Program:
    """A program to simulate.

    Attributes:
        command: its command line.
        wheel: the MindSpore that it imports.
        devices: ranks of its cluster.
        steps: training steps after which it may end.
        limit: device memory in bytes; None: what the program allows itself.
        batch: shapes of the columns of a step, if one device computes the batch of several.
    """

    command: Sequence[str]
    wheel: Wheel
    devices: int
    steps: int
    limit: int | None
    batch: Sequence[Sequence[int]] | None = None


def read_program(
    command: Sequence[str], devices: int | None, steps: int = 1, limit: int | None = None, python: str | None = None
) -> Program:
    """Find out which MindSpore a command imports, and how many devices it is written for.

    Raises:
        UserError: the command is empty or cannot be started, or its MindSpore cannot be simulated.
    """
    if not command:
        raise UserError("no program is given; write it after --, as in: mindllm offline -- python train.py")
    wheel = wheel_of(python or python_of(command))
    if devices is None:
        variable = os.environ.get("RANK_SIZE", "1")
        devices = devices_of(command) or (int(variable) if variable.isdigit() and int(variable) else 1)
    return Program(command, wheel, devices, steps, limit)


def python_of(command: Sequence[str]) -> str:
    """Return the interpreter of a command: the command itself, the one in the first line of its script, or ``python``.

    Raises:
        UserError: the command cannot be started, or starts processes of its own.
    """
    name = Path(command[0]).name
    if name in LAUNCHERS:
        raise UserError(
            f"{command[0]} starts a process for each device; give the command of one process, as in: python train.py"
        )
    executable = shutil.which(command[0])
    if executable is None:
        raise UserError(f"{command[0]}: command not found")
    return executable if PYTHON.match(name) else _interpreter(Path(executable)) or _default_python()


def _interpreter(script: Path) -> str | None:
    """Return the Python that the first line of a script names, if any."""
    with open(script, "rb") as file:
        first = file.readline(FIRST_LINE).decode(errors="replace")
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    python = next((word for word in words if PYTHON.match(Path(word).name)), None)
    return shutil.which(python) if python else None


def _default_python() -> str:
    python = shutil.which("python") or shutil.which("python3")
    if python is None:
        raise UserError("no python is on PATH; activate the environment of the program, or pass --python")
    return python


def devices_of(command: Sequence[str]) -> int | None:
    """Return the number of devices in the MindFormers YAML that a command names with ``--config``; None without one."""
    path = config_of(command)
    try:
        tree: Any = read_yaml(read_text(path, LARGEST_YAML), str(path)).data if path else None
    except (OSError, UserError):
        return None  # the program reports a better error
    sizes = tree.get("parallel_config") if isinstance(tree, dict) else None
    if not isinstance(sizes, dict) or tree.get("use_parallel") is False:
        return None
    devices = 1
    for axis in AXES:  # MindFormers runs on the product of these
        value = sizes.get(axis.key)
        devices *= value if isinstance(value, int) and value > 0 else 1
    return devices


def config_of(command: Sequence[str]) -> Path | None:
    """Return the existing YAML that a command names with ``--config``."""
    with_equal_sign = (word.partition("=")[2] for word in command if word.startswith("--config="))
    name = next(with_equal_sign, None) or dict(pairwise(command)).get("--config")
    if not name:
        return None
    # MindFormers also looks next to its script
    scripts = [Path(word).parent / name for word in command if word.endswith(".py")]
    return next((path for path in (Path(name), *scripts) if path.is_file()), None)
