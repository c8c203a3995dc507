"""A program of somebody else in MindSpore's dry run: the environment one of its ranks needs, and what is left when it has ended.

The program is not changed and runs in its own Python, where mindllm need not be installed: what must be done inside of it does a
``sitecustomize`` that Python finds first (``device/inside_program.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindllm.cache import user_cache
from mindllm.compiled.device import inside_program
from mindllm.compiled.device.stand_in import EVERYTHING, device_software, many_cores
from mindllm.compiled.device.wheel import Wheel
from mindllm.compiled.simulation.memory_tracker import BLOCKS, read_tracked
from mindllm.compiled.simulation.simulate_rank import DEVICE_MEMORY
from mindllm.compiled.simulation.simulated_process import ERRORS, MEMORY_LINES
from mindllm.compiled.simulation.simulation import Simulation
from mindllm.files import atomic_open
from mindllm.units import GIB, MIB

NODE_DEVICES = 8  # that a program finds on its machine, if it trains on as many
GRAPHS, REPORT, LOG = "graphs", "report.json", "program.log"
Shapes = Sequence[Sequence[int]]
GRANTED = re.compile(r"^MindSpore Used memory size: (\d+)M", re.MULTILINE)


@dataclass(frozen=True)
class Report:
    """What the program said of itself when it ended; see ``device/inside_program.py``.

    ``mindspore`` is None where it was never imported; ``limit`` the bytes that the program grants itself, None where it does not
    say; ``error`` the kind and text of the exception it ended with, ``missing`` the module it did not find; ``host_bytes``
    the most memory of this machine that it took.
    """

    mindspore: str | None
    mode: str | None
    target: str | None
    limit: int | None
    trained: bool
    stages: int
    devices: int
    compile_seconds: float
    host_bytes: int
    error: tuple[str, str] | None
    missing: str | None


def shell_environment(wheel: Wheel, rank: int, devices: int) -> dict[str, str]:
    """What turns any program of this wheel that is started with it into a rank in MindSpore's dry run.

    Raises:
        StandInUnavailable: this machine cannot simulate a device with the wheel.
    """
    software = device_software(wheel)
    stand_ins = {"LD_PRELOAD": _joined(str(many_cores(wheel)), "LD_PRELOAD")} if software else {}
    return {
        **software,
        **stand_ins,
        "PYTHONPATH": _joined(str(_inside()), "PYTHONPATH"),
        "MS_SIMULATION_LEVEL": "1",
        "RANK_ID": str(rank),
        "RANK_SIZE": str(devices),
        "DEVICE_ID": str(rank % NODE_DEVICES),
        "MINDLLM_NODE_DEVICES": str(min(devices, NODE_DEVICES)),
        "GLOG_v": ERRORS,
        "MS_SUBMODULE_LOG_v": MEMORY_LINES,
    }


def rank_environment(
    wheel: Wheel, rank: int, devices: int, directory: Path, steps: int, batch: Shapes | None = None
) -> dict[str, str]:
    """The same for a rank whose memory, order, graphs and ending are kept in ``directory``, and which ends after ``steps``.

    ``batch``: shapes of what a step is given, where the program is to train on one device and is written for several.
    """
    shell = shell_environment(wheel, rank, devices)
    stand_ins = Path(shell["ASCEND_HOME_PATH"]) / "lib64" / EVERYTHING if "ASCEND_HOME_PATH" in shell else ""
    tracker = f"memory_tracker:True,memory_tracker_path:{directory}"
    return {
        **shell,
        "MS_ALLOC_CONF": ",".join(filter(None, [os.environ.get("MS_ALLOC_CONF"), tracker])),
        "MS_DEV_SAVE_GRAPHS": "1",
        "MS_DEV_SAVE_GRAPHS_PATH": str(directory / GRAPHS),
        "MS_DEV_DUMP_IR_PASSES": "validate",
        inside_program.REPORT: str(directory / REPORT),
        inside_program.GRAPHS: str(directory / GRAPHS),
        inside_program.STAND_INS: str(stand_ins),
        inside_program.STEPS: str(steps),
        **({} if batch is None else {inside_program.SINGLE: json.dumps(batch)}),
    }


def _joined(first: str, name: str) -> str:
    return os.pathsep.join(filter(None, [first, os.environ.get(name, "")]))


def _inside() -> Path:
    """The directory in which the program's Python finds what runs inside of it."""
    source = Path(inside_program.__file__).read_text(encoding="utf-8")
    directory = user_cache(f"program-{hashlib.sha256(source.encode()).hexdigest()[:16]}")
    if not (directory / "sitecustomize.py").is_file():
        with atomic_open(directory / "sitecustomize.py") as file:
            file.write(source)
    return directory


def read_report(directory: Path) -> Report | None:
    """What a rank reported; None where no Python of the program came to its end."""
    path = directory / REPORT
    if not path.is_file():
        return None
    said: Mapping = json.loads(path.read_text(encoding="utf-8"))
    error = said.get("error")
    return Report(
        mindspore=said["mindspore"],
        mode=said["mode"],
        target=said.get("target"),
        limit=None if said["limit"] is None else int(said["limit"] * GIB),
        trained=said["trained"],
        stages=said.get("stages", 1),
        devices=said.get("devices", 1),
        compile_seconds=said["compile_seconds"],
        host_bytes=said["host_bytes"],
        error=(error["kind"], error["text"]) if error else None,
        missing=error["missing"] if error else None,
    )


def read_simulation(directory: Path, report: Report, rank: int, devices: int, limit: int | None) -> Simulation | None:
    """The simulation of a rank from what MindSpore left in ``directory``; None where it left none.

    Args:
        limit: bytes; None for what the program grants itself, or MindSpore where it does not say.
    """
    tracked_in = _of_rank(directory, rank)
    if not (tracked_in / BLOCKS).is_file():
        return None
    tracked = read_tracked(tracked_in, order=_of_rank(directory / GRAPHS, rank) / "execute_order")
    return Simulation(
        rank=rank,
        stage=rank // max(1, devices // report.stages),
        device_memory=DEVICE_MEMORY,
        limit=limit or report.limit or _granted(directory / LOG),
        used_peak=tracked.used_peak,
        actual_peak=tracked.actual_peak,
        blocks=tracked.blocks,
        tasks=tracked.tasks,
        collectives=tracked.collectives,
    )


def graph_texts(directory: Path, rank: int) -> list[Path]:
    """The texts of all graphs that the rank compiled."""
    return sorted(_of_rank(directory / GRAPHS, rank).glob("*_validate_*.ir"))


def executable_files(directory: Path, rank: int) -> list[Path]:
    """What is needed to execute the training graph, where the program could say it."""
    inside = (inside_program.MIND_IR, inside_program.PARAMETERS)
    return [path for name in inside if (path := _of_rank(directory / GRAPHS, rank) / name).is_file()]


def _of_rank(directory: Path, rank: int) -> Path:
    """Where MindSpore writes what is about a rank; a program that does not call ``init`` has none."""
    own = directory / f"rank_{rank}"
    return own if own.is_dir() else directory


def _granted(log: Path) -> int:
    """What MindSpore takes where a program does not say: most of the device."""
    found = GRANTED.search(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else None
    return int(found[1]) * MIB if found else DEVICE_MEMORY


def training_graph(directory: Path, rank: int) -> Path | None:
    """The largest of them with a backward pass."""
    files = sorted(graph_texts(directory, rank), key=lambda path: -path.stat().st_size)
    return next((path for path in files if inside_program.BACKWARD in path.read_bytes()), None)
