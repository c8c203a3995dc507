"""MindSpore summary files of the scalars of a run, which MindInsight shows.

``SummaryRecord`` of MindSpore is not used: it forks a process that polls its queue without a pause, which takes one core from
the training on a CPU, and whose children inherit the handlers of the run's stop signals. Its file writer is.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspore.train import summary_pb2
from mindspore.train.summary.writer import SummaryWriter

from mindllm.train.callbacks.callback import Callback
from mindllm.train.expert_loads import LayerLoad
from mindllm.train.state import RunState, StepRecord

SCALARS = ("loss", "learning_rate", "global_norm", "loss_scale", "tokens_per_s", "step_time_s", "mfu")
PLUGIN = "summary"


class SummaryMonitor(Callback):
    """Records the scalars of every ``collect_freq``-th step."""

    of_first_rank = True

    def __init__(self, summary_dir: str, collect_freq: int) -> None:
        self.summary_dir = summary_dir
        self.collect_freq = collect_freq
        self.writer: SummaryWriter | None = None

    def begin(self, state: RunState) -> None:
        directory = Path(self.summary_dir or state.output_dir / "summary")
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.events.summary.{int(time.time())}.{os.getpid()}.{socket.gethostname()}_MS"
        self.writer = SummaryWriter(str(directory / name))

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if self.writer is None or (record.step % self.collect_freq and not state.scores):
            return
        ahead = {} if state.mtp_loss is None else {"mtp_loss": state.mtp_loss}
        scalars = {**state.scores, **ahead, **state.preference, **load_scalars(state.expert_loads)}
        self.writer.write(PLUGIN, scalar_event(record, scalars).SerializeToString())
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def load_scalars(loads: Sequence[LayerLoad]) -> dict[str, float]:
    """Of every layer with experts: the busiest relative to the mean, and the part of choices that was dropped."""
    largest = {f"expert_load/layer_{load.layer}": load.largest for load in loads}
    return largest | {f"expert_dropped/layer_{load.layer}": load.dropped for load in loads}


def scalar_event(record: StepRecord, scores: Mapping[str, float]) -> summary_pb2.Event:
    """One event with the finite scalars of a step and the ``scores`` after it; the dashboard has no place for a NaN."""
    event = summary_pb2.Event(wall_time=time.time(), step=record.step)
    for name, value in {**{name: float(getattr(record, name)) for name in SCALARS}, **scores}.items():
        if math.isfinite(value):
            event.summary.value.add(tag=name, scalar_value=value)
    return event
