"""The installed wheel of MindSpore whose Ascend back end simulates: of this Python, or of another one.

Nothing of it is imported: the environment that it needs must be set before.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mindllm.compiled.device.elf import machine_of
from mindllm.compiled.device.stand_in_names import MACHINES
from mindllm.errors import UserError
from mindllm.versions import MINDSPORE, MINDSPORE_RELEASE

OWN_VERSIONS = ("2.9", MINDSPORE)  # that mindllm's own runs were simulated with
PROGRAM_VERSIONS = ("2.7", "2.8", "2.9", MINDSPORE)  # that programs of others were
ASK_SECONDS = 60
LOOK = """
import importlib.util, json
from importlib import metadata
found = importlib.util.find_spec("mindspore")
print(json.dumps(None if found is None or found.origin is None else [found.origin, metadata.version("mindspore")]))
"""


class StandInUnavailable(UserError):
    """This machine, or its MindSpore, cannot simulate an Ascend device."""


@dataclass(frozen=True)
class Wheel:
    """``package``: the directory ``mindspore`` in ``site-packages``."""

    package: Path
    version: str


def own_wheel() -> Wheel:
    """Return the wheel of this Python.

    Raises:
        StandInUnavailable: there is none, or none that simulates here.
    """
    specification = importlib.util.find_spec("mindspore")
    if specification is None or specification.origin is None:
        raise StandInUnavailable("MindSpore is not installed")
    return _usable(Wheel(Path(specification.origin).parent, metadata.version("mindspore")), OWN_VERSIONS)


def wheel_of(python: str) -> Wheel:
    """Return the wheel that the interpreter ``python`` imports.

    Raises:
        StandInUnavailable: there is none, or none that simulates here.
        UserError: ``python`` cannot be run.
    """
    try:
        asked = subprocess.run([python, "-c", LOOK], capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        found = json.loads(asked.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        raise UserError(f"{python}: does not answer as a Python interpreter ({error})") from None
    if found is None:
        raise StandInUnavailable(f"MindSpore is not installed for {python}")
    return _usable(Wheel(Path(found[0]).parent, found[1]), PROGRAM_VERSIONS)


def _usable(wheel: Wheel, versions: Collection[str]) -> Wheel:
    """Return the wheel if it simulates on this machine."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise StandInUnavailable(f"MindSpore has no Ascend back end for {platform.system()} on {platform.machine()}")
    if ".".join(wheel.version.split(".")[:2]) not in versions:
        raise StandInUnavailable(
            f"simulating a device was verified with MindSpore {', '.join(versions)}, not {wheel.version}; "
            f"pip install mindspore=={MINDSPORE_RELEASE}"
        )
    libraries = wheel.package / "lib"
    if not list((libraries / "plugin").glob("libmindspore_ascend.so*")):
        raise StandInUnavailable(f"this MindSpore was stripped of its Ascend back end ({libraries / 'plugin'})")
    if (machine := _machine(libraries / "libmindspore_core.so")) not in (None, platform.machine()):
        raise StandInUnavailable(
            f"the MindSpore in {wheel.package} is built for {machine}, and this machine is {platform.machine()}; "
            "install the wheel for it"
        )
    return wheel


def _machine(library: Path) -> str | None:
    """Return the processor of a library, by the name of ``uname``; None if it is unknown."""
    if not library.is_file():
        return None
    with open(library, "rb") as file:
        number = machine_of(file.read(64))
    return next((name for name, known in MACHINES.items() if known == number), f"processor {number}")
