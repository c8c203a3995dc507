"""Environment of a rank of a program in MindSpore's dry run, and reading its results once it has ended.

The program runs unchanged in its own Python, where mindllm need not be installed. Whatever must happen inside the program is
done by a ``sitecustomize`` that Python imports first (``inside_program.py``).
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
from mindllm.compiled.device.stand_in import EVERYTHING, device_software, many_cores
from mindllm.compiled.device.wheel import Wheel
from mindllm.compiled.simulation.memory_tracker import BLOCKS, read_tracked
from mindllm.compiled.simulation.simulate_rank import DEVICE_MEMORY
from mindllm.compiled.simulation.simulated_process import ERRORS, MEMORY_LINES
from mindllm.compiled.simulation.simulation import Simulation
from mindllm.files import atomic_open
from mindllm.programs import inside_program
from mindllm.units import GIB, MIB

NODE_DEVICES = 8  # devices that a program finds on its machine, if it trains on at least as many
GRAPHS, REPORT, LOG = "graphs", "report.json", "program.log"
Shapes = Sequence[Sequence[int]]
DEFAULT_LIMIT = re.compile(r"^MindSpore Used memory size: (\d+)M", re.MULTILINE)


@dataclass(frozen=True)
class Report:
    """Report that a program writes when it ends; see ``inside_program.py``.

    Attributes:
        mindspore: its version; None if the program did not import it.
        mode: ``graph`` or ``pynative``.
        target: device target that the program sets.
        limit: device memory in bytes that the program allows itself; None if it sets no limit.
        trained: whether it ran a training graph.
        stages: of its pipeline.
        devices: of its cluster.
        compile_seconds: time to compile its graphs.
        host_bytes: peak of this machine's memory.
        error: type and text of the exception that ended it.
        missing: name of a module that it could not import.
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
    """Return the variables that make a program of this wheel a rank in MindSpore's dry run.

    Raises:
        StandInUnavailable: this machine cannot simulate a device with the wheel.
    """
    software = device_software(wheel)
    preload = {"LD_PRELOAD": _prepend(str(many_cores(wheel)), "LD_PRELOAD")} if software else {}
    return {
        **software,
        **preload,
        "PYTHONPATH": _prepend(str(_sitecustomize()), "PYTHONPATH"),
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
    """Return the variables for a rank that writes memory, order, graphs and report to ``directory``, and ends after ``steps``.

    Args:
        batch: shapes of the columns of a step, if one device computes the batch of several.
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


def _prepend(entry: str, variable: str) -> str:
    """Return the value of a search path with ``entry`` first."""
    return os.pathsep.join(filter(None, [entry, os.environ.get(variable, "")]))


def _sitecustomize() -> Path:
    """Return a directory that contains ``inside_program.py`` under the name that Python imports."""
    source = Path(inside_program.__file__).read_text(encoding="utf-8")
    directory = user_cache(f"program-{hashlib.sha256(source.encode()).hexdigest()[:16]}")
    if not (directory / "sitecustomize.py").is_file():
        with atomic_open(directory / "sitecustomize.py") as file:
            file.write(source)
    return directory


def read_report(directory: Path) -> Report | None:
    """Read the report of a rank; None if no Python of the program ended normally."""
    path = directory / REPORT
    if not path.is_file():
        return None
    tree: Mapping = json.loads(path.read_text(encoding="utf-8"))
    error = tree.get("error")
    return Report(
        mindspore=tree["mindspore"],
        mode=tree["mode"],
        target=tree.get("target"),
        limit=None if tree["limit"] is None else int(tree["limit"] * GIB),
        trained=tree["trained"],
        stages=tree.get("stages", 1),
        devices=tree.get("devices", 1),
        compile_seconds=tree["compile_seconds"],
        host_bytes=tree["host_bytes"],
        error=(error["kind"], error["text"]) if error else None,
        missing=error["missing"] if error else None,
    )


def read_simulation(directory: Path, report: Report, rank: int, devices: int, limit: int | None) -> Simulation | None:
    """Read the simulation of a rank from MindSpore's files in ``directory``; None without any.

    Args:
        limit: device memory in bytes; None: the program's own limit, else MindSpore's default.
    """
    tracker_directory = _rank_directory(directory, rank)
    if not (tracker_directory / BLOCKS).is_file():
        return None
    tracked = read_tracked(tracker_directory, order=_rank_directory(directory / GRAPHS, rank) / "execute_order")
    return Simulation(
        rank=rank,
        stage=rank // max(1, devices // report.stages),
        device_memory=DEVICE_MEMORY,
        limit=limit or report.limit or _default_limit(directory / LOG),
        used_peak=tracked.used_peak,
        actual_peak=tracked.actual_peak,
        blocks=tracked.blocks,
        tasks=tracked.tasks,
        collectives=tracked.collectives,
    )


def _default_limit(log: Path) -> int:
    """Return the memory that MindSpore takes if the program sets no limit: most of the device."""
    match = DEFAULT_LIMIT.search(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else None
    return int(match[1]) * MIB if match else DEVICE_MEMORY


def graph_texts(directory: Path, rank: int) -> list[Path]:
    """Return the texts of all graphs that the rank compiled."""
    return sorted(_rank_directory(directory / GRAPHS, rank).glob("*_validate_*.ir"))


def training_graph(directory: Path, rank: int) -> Path | None:
    """Return the largest text of a graph with a backward pass."""
    files = sorted(graph_texts(directory, rank), key=lambda path: -path.stat().st_size)
    return next((path for path in files if inside_program.BACKWARD in path.read_bytes()), None)


def executable_files(directory: Path, rank: int) -> list[Path]:
    """Return the files needed to execute the training graph, as far as the program could write them."""
    names = (inside_program.MIND_IR, inside_program.PARAMETERS)
    return [path for name in names if (path := _rank_directory(directory / GRAPHS, rank) / name).is_file()]


def _rank_directory(directory: Path, rank: int) -> Path:
    """Return where MindSpore writes the files of a rank; a program that does not call ``init`` has no directory for it."""
    of_rank = directory / f"rank_{rank}"
    return of_rank if of_rank.is_dir() else directory
