"""Callbacks that write metrics: ``{output_dir}/metrics.jsonl``, and MindSpore summary files for MindInsight.

Each step is in ``metrics.jsonl`` once, however often the run was stopped and resumed. MindSpore's ``SummaryRecord`` is not used,
only its file writer: it forks a process that busy-waits, which takes one core on a CPU, and whose children inherit the handlers
of stop signals.
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
    """Appends the record of every step. Records that a full disk rejects are written later."""

    first_rank_only = True

    def __init__(self, expert_load_steps: int = 1) -> None:
        self.expert_load_steps = expert_load_steps
        self.file: MetricsFile | None = None
        self.pending: list[dict[str, Any]] = []
        self.problem = ""
        self.lost = ""

    def begin(self, state: RunState) -> None:
        self.file = MetricsFile(state.output_dir / METRICS_NAME)
        self.file.rewind(state.step)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        scores = {"scores": dict(state.scores)} if state.scores else {}
        experts = {"experts": loads} if (loads := self._expert_loads(state, record)) else {}
        mtp = {} if state.mtp_loss is None else {"mtp_loss": state.mtp_loss}
        health = {"health": dict(state.health)} if state.health else {}
        memory = {} if (peak := used_peak_memory(state.config)) is None else {"used_peak_bytes": peak}
        entry = {**asdict(record), **mtp, **state.preference, **state.against_proof}
        self.pending.append({**entry, **scores, **experts, **health, **memory})
        self._write()

    def _expert_loads(self, state: RunState, record: StepRecord) -> list[dict[str, Any]]:
        """Return, for every layer with experts, the tokens of each expert and the number of dropped choices."""
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
            self._reopen_if_deleted(self.file, self.pending[0]["step"])
            while self.pending:
                self.file.append(self.pending[0])
                del self.pending[0]
        except OSError as error:
            if not self.problem:
                logger.error("%s: steps cannot be written at the moment: %s", self.file.path, error)
            self.problem = f"{self.file.path}: {len(self.pending)} steps are missing: {error}"
        else:
            self.problem = ""

    def _reopen_if_deleted(self, file: MetricsFile, step: int) -> None:
        """Log the loss of steps before ``step`` and continue in a new file, if the file was deleted."""
        if file.is_in_place():
            return
        self.lost = f"{file.path} was deleted or moved during the run: steps before {step} are lost"
        logger.error("%s", self.lost)
        self.file = MetricsFile(file.path)
        file.close()

    def end(self, state: RunState) -> None:
        if self.file is not None:
            self._reopen_if_deleted(self.file, state.step + 1)
        state.failures += filter(None, (self.lost, self.problem))
        state.results["metrics"] = str(state.output_dir / METRICS_NAME)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class SummaryMonitor(Callback):
    """Writes the scalars of every ``collect_freq``-th step."""

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
    """Return per layer: the load of the busiest expert over the mean, MaxVio, and the share of dropped choices.

    ``max_violation`` is the largest MaxVio of all layers.
    """
    scalars = {f"expert_load/layer_{load.layer}": load.largest for load in loads}
    if loads:
        scalars["max_violation"] = max(load.max_violation for load in loads)
    scalars |= {f"max_violation/layer_{load.layer}": load.max_violation for load in loads}
    return scalars | {f"expert_dropped/layer_{load.layer}": load.dropped for load in loads}


def scalars_of(state: RunState, record: StepRecord) -> dict[str, float]:
    """Return the finite scalars of a step, including figures of other callbacks. Dashboards cannot show NaN."""
    scalars = {
        **{name: float(getattr(record, name)) for name in SCALARS},
        **state.scores,
        **({} if state.mtp_loss is None else {"mtp_loss": state.mtp_loss}),
        **state.preference,
        **state.against_proof,
        **load_scalars(state.expert_loads),
        **state.health,
    }
    return {name: value for name, value in scalars.items() if math.isfinite(value)}


def scalar_event(step: int, scalars: Mapping[str, float]) -> summary_pb2.Event:
    """Return an event with the scalars of a step."""
    event = summary_pb2.Event(wall_time=time.time(), step=step)
    for name, value in scalars.items():
        event.summary.value.add(tag=name, scalar_value=value)
    return event
