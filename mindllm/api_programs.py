"""The public functions that look at anybody's program: time_program, verify_program. As :mod:`mindllm.api`, of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.api import described
from mindllm.arguments import Count, checked

if TYPE_CHECKING:
    from mindllm.programs.step_time import ProgramStep
    from mindllm.programs.verify import ProgramOutcome
    from mindllm.timing.device import Device


@checked
def time_program(
    directory: str | Path, *, device: Device | str | Path | None = None, zero_shot: bool = False
) -> ProgramStep:
    """Predict how long a step of anybody's program takes, from its compiled graphs. No MindSpore.

    Args:
        directory: what ``mindllm offline`` kept of the program.
        device: a described device, as of :func:`step_time`.
        zero_shot: the device as it was before it was calibrated.

    Raises:
        UserError: ranks are missing, the pipeline is interleaved, or the device lacks a figure.
    """
    from mindllm.programs import time_program as predict
    from mindllm.timing.measured.calibrate import uncalibrated

    known = described(device)
    return predict(Path(directory), uncalibrated(known) if zero_shot else known)


@checked
def verify_program(directory: str | Path, *, single: str | Path | None = None, steps: Count = 2) -> ProgramOutcome:
    """Show whether all ranks of anybody's program agree with each other, and with the program on a single device.

    Args:
        directory: what ``mindllm offline --ranks all`` kept of the program.
        single: what it kept of the same program on one device; None: what stands beside the ranks, if anything does.
        steps: training steps that all ranks do together.

    Raises:
        UserError: ranks are missing, or were not kept so that they can be executed.
        RunFailed: the graphs hold operators that nothing here computes.
        CheckFailed: ranks wait for each other.
    """
    from mindllm.verify.verification import silence_mindspore

    silence_mindspore()
    from mindllm.programs import verify_program as check

    return check(Path(directory), None if single is None else Path(single), steps)
