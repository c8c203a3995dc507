"""``{output_dir}/metrics.jsonl``: one object per step, each step once, however often the run was stopped and resumed."""

from __future__ import annotations

from dataclasses import asdict

from mindllm.train.callbacks.callback import Callback
from mindllm.train.metrics_file import MetricsFile
from mindllm.train.state import RunState, StepRecord

METRICS_NAME = "metrics.jsonl"


class MetricsMonitor(Callback):
    """Appends every step's record."""

    of_first_rank = True

    def __init__(self) -> None:
        self.file: MetricsFile | None = None

    def begin(self, state: RunState) -> None:
        self.file = MetricsFile(state.output_dir / METRICS_NAME)
        self.file.rewind(state.step)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        assert self.file is not None
        self.file.append(asdict(record))

    def end(self, state: RunState) -> None:
        state.results["metrics"] = str(state.output_dir / METRICS_NAME)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
