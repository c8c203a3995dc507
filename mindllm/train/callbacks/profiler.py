"""Callback that profiles a window of steps with MindSpore's profiler and writes a trace for Chrome and Perfetto."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.profiler import ProfilerActivity, ProfilerLevel, _ExperimentalConfig, tensorboard_trace_handler

from mindllm.config import RunConfig
from mindllm.files import atomic_open
from mindllm.train.callbacks.callback import Callback
from mindllm.train.state import RunState, StepRecord

TRACE_NAME = "trace.json"
logger = logging.getLogger(__name__)


class ProfileMonitor(Callback):
    """Profiles steps ``profile_start_step`` to ``profile_stop_step``. The first step of a process includes compilation."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self.config = config
        self.directory = Path(config.output_dir) / "profile" / f"rank_{rank}"
        self.profiler: Any = None

    def step_begin(self, state: RunState) -> None:
        first, last = self.config.profile_start_step, self.config.profile_stop_step
        if self.profiler is None and first <= state.step + 1 <= last:
            self.profiler = self._create()
            self.profiler.start()

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if self.profiler is not None and record.step == min(self.config.profile_stop_step, state.last_step):
            self._finish()

    def end(self, state: RunState) -> None:
        if self.profiler is not None:
            self._finish()

    def _create(self) -> Any:
        shutil.rmtree(self.directory / "raw", ignore_errors=True)
        activities = [ProfilerActivity.CPU]
        if self.config.context.device_target == "Ascend":
            activities.append(ProfilerActivity.NPU)
        return ms.profiler.profile(
            activities=activities,
            with_stack=self.config.with_stack,
            profile_memory=self.config.profile_memory,
            # Level 1 records the shapes of kernels on Ascend.
            experimental_config=_ExperimentalConfig(profiler_level=ProfilerLevel.Level1),
            on_trace_ready=tensorboard_trace_handler(str(self.directory / "raw")),
            start_profile=False,
        )

    def _finish(self) -> None:
        self.profiler.stop()
        self.profiler = None
        traces = sorted((self.directory / "raw").rglob("trace_view.json"))
        if not traces:
            logger.error("the profiler wrote no trace below %s", self.directory / "raw")
            return
        with atomic_open(self.directory / TRACE_NAME) as file:
            json.dump({"traceEvents": numeric_times(json.loads(traces[-1].read_text()))}, file)
        logger.info("profile: open %s in chrome://tracing or ui.perfetto.dev", self.directory / TRACE_NAME)


def numeric_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events with numeric times in microseconds; MindSpore writes them as text."""
    times = ("ts", "dur")
    return [{key: float(value) if key in times else value for key, value in event.items()} for event in events]
