"""``{output_dir}/metrics.jsonl``: one object per step, each step once, however often the run was stopped and resumed.

And MindSpore summary files of the scalars of a run, which MindInsight shows.

``SummaryRecord`` of MindSpore is not used: it forks a process that polls its queue without a pause, which takes one core from
the training on a CPU, and whose children inherit the handlers of the run's stop signals. Its file writer is.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspore.train import summary_pb2
from mindspore.train.summary.writer import SummaryWriter

from mindllm.train.callbacks.callback import Callback
from mindllm.train.device import used_peak_memory
from mindllm.train.expert_loads import LayerLoad
from mindllm.train.metrics_file import METRICS_NAME, MetricsFile
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)
SCALARS = (
    "loss", "learning_rate", "global_norm", "loss_scale", "tokens_per_s", "step_time_s", "mfu", "overflow_share", "data_wait_s",
)  # fmt: skip
PLUGIN = "summary"


class MetricsMonitor(Callback):
    """Appends every step's record; what a full disk does not take is written when it has room again."""

    first_rank_only = True

    def __init__(self, expert_load_steps: int = 1) -> None:
        self.expert_load_steps = expert_load_steps
        self.file: MetricsFile | None = None
        self.waiting: list[dict[str, Any]] = []
        self.problem = ""
        self.lost = ""

    def begin(self, state: RunState) -> None:
        self.file = MetricsFile(state.output_dir / METRICS_NAME)
        self.file.rewind(state.step)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        scores = {"scores": dict(state.scores)} if state.scores else {}
        experts = {"experts": loads} if (loads := self._expert_loads(state, record)) else {}
        ahead = {} if state.mtp_loss is None else {"mtp_loss": state.mtp_loss}
        health = {"health": dict(state.health)} if state.health else {}
        used = {} if (peak := used_peak_memory(state.config)) is None else {"used_peak_bytes": peak}
        further = (ahead, state.preference, state.against_proof, scores, experts, health, used)
        self.waiting.append({**asdict(record), **{key: value for one in further for key, value in one.items()}})
        self._write()

    def _expert_loads(self, state: RunState, record: StepRecord) -> list[dict[str, Any]]:
        """Of every layer with experts the tokens that chose each, and how many of all choices found no place."""
        if record.step % self.expert_load_steps:
            return []
        choices = record.tokens * state.config.model.config.num_experts_chosen
        return [
            {
                "layer": load.layer,
                "tokens": load.tokens(record.tokens),
                "dropped": round(load.dropped * choices),
                "max_violation": load.max_violation,
            }
            for load in state.expert_loads
        ]

    def _write(self) -> None:
        assert self.file is not None
        try:
            self._begin_again_if_deleted(self.file, self.waiting[0]["step"])
            while self.waiting:
                self.file.append(self.waiting[0])
                del self.waiting[0]
        except OSError as error:
            if not self.problem:
                logger.error("%s: steps are not written for now: %s", self.file.path, error)
            self.problem = f"{len(self.waiting)} steps are missing in {self.file.path}: {error}"
        else:
            self.problem = ""

    def _begin_again_if_deleted(self, file: MetricsFile, step: int) -> None:
        """Says what was lost before ``step`` and goes on in a new file."""
        if file.is_in_place():
            return
        self.lost = f"{file.path} was deleted or moved during the run: steps before {step} are lost"
        logger.error("%s", self.lost)
        self.file = MetricsFile(file.path)
        file.close()

    def end(self, state: RunState) -> None:
        if self.file is not None:
            self._begin_again_if_deleted(self.file, state.step + 1)
        state.failures += filter(None, (self.lost, self.problem))
        state.results["metrics"] = str(state.output_dir / METRICS_NAME)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class SummaryMonitor(Callback):
    """Records the scalars of every ``collect_freq``-th step."""

    first_rank_only = True

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
        self.writer.write(PLUGIN, scalar_event(record.step, scalars_of(state, record)).SerializeToString())
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def load_scalars(loads: Sequence[LayerLoad]) -> dict[str, float]:
    """Of every layer with experts: the busiest relative to the mean, the same less 1, and the part of choices that was dropped.

    And the largest violation of all layers.
    """
    largest = {f"expert_load/layer_{load.layer}": load.largest for load in loads}
    if loads:
        largest["max_violation"] = max(load.max_violation for load in loads)
    largest |= {f"max_violation/layer_{load.layer}": load.max_violation for load in loads}
    return largest | {f"expert_dropped/layer_{load.layer}": load.dropped for load in loads}


def scalars_of(state: RunState, record: StepRecord) -> dict[str, float]:
    """The finite scalars of a step, and what callbacks have found after it: dashboards have no place for a NaN."""
    of_step = {name: float(getattr(record, name)) for name in SCALARS}
    ahead = {} if state.mtp_loss is None else {"mtp_loss": state.mtp_loss}
    found = {
        **state.scores,
        **ahead,
        **state.preference,
        **state.against_proof,
        **load_scalars(state.expert_loads),
        **state.health,
    }
    return {name: value for name, value in {**of_step, **found}.items() if math.isfinite(value)}


def scalar_event(step: int, scalars: Mapping[str, float]) -> summary_pb2.Event:
    """One event with the scalars of a step."""
    event = summary_pb2.Event(wall_time=time.time(), step=step)
    for name, value in scalars.items():
        event.summary.value.add(tag=name, scalar_value=value)
    return event
