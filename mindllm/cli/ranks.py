"""Ranks that a command starts: by what, where a scheduler's task starts them, and how a terminal shows the job."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.terminal.console import error_console
from mindllm.terminal.text import visible

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.launch.clusters.placement import Placement

DEVICES = Path("/dev"), "davinci[0-9]*"  # where there are Ascend devices, MindSpore's msrun starts the ranks
LOGS = "launch_log"  # in output_dir: what each rank writes that a scheduler's tasks have started


def has_ascend_devices() -> bool:
    """Whether this machine has Ascend devices."""
    directory, pattern = DEVICES
    return any(directory.glob(pattern))


def task_of_several(config: RunConfig) -> Placement | None:
    """The task of a scheduler that this process is, where its tasks are to be the run's ranks, and it is not one already."""
    from mindllm.launch.clusters.placement import is_rank
    from mindllm.launch.clusters.schedulers import placement_of
    from mindllm.train.job.execution import is_simulation

    several = config.parallel_config.device_num > 1 and config.run_mode in ("train", "finetune", "eval")
    place = placement_of() if several and not is_simulation() and not is_rank() else None
    return place if place and place.tasks > 1 else None


def start_ranks(config: RunConfig, place: Placement) -> int:
    """Start the ranks of this task, by the same command line."""
    from mindllm.launch.script import own_command
    from mindllm.launch.start import Launch, launch, placed, refuse_impossible

    devices, output = config.parallel_config.device_num, Path(config.output_dir)
    msrun = has_ascend_devices() and not place.shares_machines
    command = tuple(own_command(sys.orig_argv, msrun))
    wanted = placed(Launch(command, devices, devices, output / LOGS, output, msrun=msrun), place)
    refuse_impossible(wanted)
    return launch(wanted, say, Shown())


def say(text: str) -> None:
    """Print a line about the job on standard error."""
    error_console.print(text)


class Shown:
    """Prints what rank 0 writes; a terminal is shown control characters instead of obeying them."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def __call__(self, written: bytes) -> None:
        """Print what was written since the last call."""
        if sys.stdout.isatty():
            written = visible(self.decoder.decode(written)).encode()
        sys.stdout.buffer.write(written)
        sys.stdout.buffer.flush()
