"""Other people's MindSpore programs: simulated, timed and verified without a device and without changes.

The three functions below are the entry point of the package. Its files, in the order in which a program passes through them:

- ``command_line.py``, ``environment.py``, ``inside_program.py``: what starts a rank of the program in MindSpore's dry run.
- ``simulate.py``, ``memory.py``: run ranks, keep the results in a directory, and show what fills the memory.
- ``kept.py``: read the directory again.
- ``step_time.py``: predict the time of a step from the kept graphs.
- ``lockstep.py``, ``verify.py``: execute all ranks together, and compare them with the program on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.terminal.progress import Progress, unwatched

if TYPE_CHECKING:
    from mindllm.programs.memory import ProgramMemory
    from mindllm.programs.step_time import ProgramStep
    from mindllm.programs.verify import ProgramOutcome
    from mindllm.timing.device import Device


def simulate_program(
    command: Sequence[str],
    keep: Path,
    *,
    devices: int | None = None,
    ranks: str = "stages",
    steps: int = 1,
    limit: int | None = None,
    python: str | None = None,
    workers: int | None = None,
    progress: Progress = unwatched,
) -> ProgramMemory:
    """Run ranks of a program in MindSpore's dry run, and keep their simulations, graphs and logs.

    Args:
        command: program and arguments, for one process.
        keep: directory for the results and the page that shows what fills the memory.
        devices: ranks of the cluster; None: as the YAML of the program says, else ``RANK_SIZE``, else 1.
        ranks: ``stages`` (the first rank of each), ``all`` (also the program on one device), or numbers such as ``0,8``.
        steps: training steps to simulate.
        limit: device memory in bytes; None: what the program allows itself.
        python: the program's interpreter; None: the one that the command runs.
        workers: ranks at a time; None: as many as memory allows.
        progress: receives the ranks that run.

    Raises:
        UserError: wrong arguments, a program that does not train, or a machine that cannot simulate a device.
    """
    from mindllm.programs.command_line import read_program
    from mindllm.programs.simulate import simulate

    program = read_program(command, devices, steps, limit, python)
    return simulate(program, ranks, keep, workers, progress)


def time_program(directory: Path, device: Device) -> ProgramStep:
    """Predict the time of a training step from the graphs in ``directory``, which :func:`simulate_program` kept.

    Raises:
        UserError: ranks are missing, the pipeline is interleaved, or the device lacks a figure.
    """
    from mindllm.programs.step_time import predict_step

    return predict_step(directory, device)


def verify_program(directory: Path, single: Path | None = None, steps: int = 2) -> ProgramOutcome:
    """Execute all ranks in ``directory`` together, and compare them with the program on one device.

    Args:
        directory: results of :func:`simulate_program` with all ranks.
        single: results for the same program on one device; None: those next to the ranks, if there are any.
        steps: training steps to execute.

    Raises:
        UserError: ranks are missing, or cannot be executed.
        RunFailed: the graphs contain operators without a kernel.
        Deadlock: ranks wait for each other.
    """
    from mindllm.programs.verify import check_program

    return check_program(directory, single, steps)
