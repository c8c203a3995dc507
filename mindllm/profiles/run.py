"""A run's recorded step beside its predicted one."""

from __future__ import annotations

from pathlib import Path

from mindllm.config import RunConfig
from mindllm.profiles.compare import compare
from mindllm.profiles.directories import left_out, read_recording
from mindllm.profiles.report import ProfileReport
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device
from mindllm.timing.step import step_time


def explain_profile(config: RunConfig, directory: Path, device: Device, steps: int | None = None) -> ProfileReport:
    """Say where the recorded step of a run differs from the predicted one.

    Args:
        config: the run that was recorded.
        directory: of one rank's files of MindSpore's profiler, or above those of several.
        device: that it ran on.
        steps: of a recording whose files do not tell them apart; None: those of ``profile_start_step`` and ``profile_stop_step``.

    Raises:
        UserError: the run has something that is not modelled, or a file is of another form.
    """
    step = step_time(workload_of(config), device)
    told = 1 + config.profile_stop_step - config.profile_start_step if config.profile else 1
    records, notes = read_recording(directory, steps or max(1, told))
    if len({record.steps for record in records}) == 1 and records[0].steps == (steps or told) > 1:
        notes.append(f"a recording is taken to hold {records[0].steps} steps where its files do not tell them apart")
    missing = left_out(records, step.workload.strategy.device_num)
    return ProfileReport(compare(step, records), tuple([*notes, missing] if missing else notes))
