"""Results of runs that trained or evaluated: losses, output directory, last checkpoint, loss on held-out text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig, override_config, render_config
from mindllm.config.callbacks import MetricsMonitorConfig
from mindllm.jobs.process import run_yaml_in_child
from mindllm.results import Result
from mindllm.run.proof import summarize_proof
from mindllm.terminal.progress import Progress, unwatched
from mindllm.terminal.tables import Table, figures
from mindllm.train.checkpoint import CheckpointStore
from mindllm.train.job.output_directory import CHECKPOINTS
from mindllm.train.metrics_file import METRICS_NAME, read_metrics

if TYPE_CHECKING:
    from mindllm.results import Part

HELD_OUT = "evaluation/held_out.json"
TABLE_STEPS = 10


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run in this process.

    Attributes:
        results: names and values that are printed at the end.
        scores: tables of task scores.
        failures: errors that did not end the run.
        interrupted: True if a signal stopped the run after a step.
    """

    results: Mapping[str, str] = field(default_factory=dict)
    scores: str = ""
    failures: tuple[str, ...] = ()
    interrupted: bool = False


@dataclass(frozen=True, repr=False)
class Training(Result):
    """A finished training run.

    Attributes:
        config: the run.
        records: the entries of ``metrics.jsonl``, one per step, including steps before a restart.
        checkpoint: the last checkpoint; None if none was saved.
    """

    config: RunConfig
    records: tuple[Mapping[str, Any], ...]
    checkpoint: Path | None

    @property
    def output_dir(self) -> Path:
        """The output directory of the run."""
        return Path(self.config.output_dir)

    @property
    def losses(self) -> tuple[float | None, ...]:
        """The loss of every step in nats per token; None if not finite."""
        return tuple(record["loss"] for record in self.records)

    @property
    def steps(self) -> int:
        """The last step."""
        return self.records[-1]["step"] if self.records else 0

    def summary(self) -> str:
        """Return the number of steps and the last loss."""
        return f"{self.steps} steps, loss {_format_value(self.losses[-1] if self.losses else None)}"

    def tree(self) -> dict[str, Any]:
        """Return the losses and paths as plain data."""
        return {
            "output_dir": str(self.output_dir),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "steps": self.steps,
            "losses": list(self.losses),
        }

    def parts(self) -> Iterator[Part]:
        """Yield a table of ten evenly spaced steps, then the paths of the checkpoint and the run."""
        last = len(self.records) - 1
        indices = (
            sorted({round(last * part / (TABLE_STEPS - 1)) for part in range(TABLE_STEPS)}) if self.records else []
        )
        rows = []
        for record in (self.records[index] for index in indices):
            values = (record["loss"], record["learning_rate"], record["tokens_per_s"])
            rows.append([str(record["step"]), *map(_format_value, values)])
        yield Table(f"{self.steps} steps", figures("step", "loss", "learning rate", "tokens/s"), rows)
        yield f"checkpoint: {self.checkpoint or 'none'}"
        yield f"run: {self.output_dir}"


@dataclass(frozen=True, repr=False)
class HeldOutLoss(Result):
    """The loss of a checkpoint on held-out text or preference pairs. ``values`` holds every computed figure."""

    values: Mapping[str, Any]

    @property
    def loss(self) -> float:
        """Loss in nats per token, or per pair."""
        return self.values["loss"]

    def summary(self) -> str:
        """Return the loss."""
        return f"loss {self.loss:.4f}"

    def tree(self) -> dict[str, Any]:
        """Return loss, perplexity, bits per byte, tokens, the baseline, the split and the checkpoint."""
        return dict(self.values)

    def parts(self) -> Iterator[Part]:
        """Yield the line that is also logged."""
        yield f"{self.values['checkpoint']} on the {self.values['split']} split: {self.values['text']}"


def train_in_child(config: RunConfig, progress: Progress = unwatched) -> Training:
    """Train in a subprocess. ``progress`` is called with the number of finished steps.

    Raises:
        UserError: the configuration is wrong, or the output directory has results of another run.
        RunFailed: training failed.
        CheckFailed: the run requires a proof and does not have one.
    """
    if config.require_proof:
        summarize_proof(config)
    # The losses are read from the metrics, so their callback is added if it is missing.
    if not any(isinstance(item, MetricsMonitorConfig) for item in config.callbacks):
        entries = [*config.model_dump(by_alias=True)["callbacks"], {"type": "MetricsMonitor"}]
        config = override_config(config, {"callbacks": entries})
    directory = Path(config.output_dir)
    metrics = directory / METRICS_NAME
    total = config.runner_config.stop_step or config.runner_config.train_steps
    last_size = 0

    def poll_metrics() -> None:
        nonlocal last_size
        size = metrics.stat().st_size if metrics.is_file() else 0
        if size != last_size and (records := read_metrics(metrics)):
            progress("training", records[-1]["step"], total)
        last_size = size

    on_poll = poll_metrics if progress is not unwatched else lambda: None
    run_yaml_in_child(render_config(config), config.run_mode, on_poll)
    newest = CheckpointStore(directory / CHECKPOINTS).newest()
    return Training(config, tuple(read_metrics(metrics)), newest)


def evaluate_in_child(config: RunConfig) -> HeldOutLoss:
    """Compute the loss of ``load_checkpoint`` on held-out text in a subprocess.

    Raises:
        UserError: the configuration is wrong, or ``load_checkpoint`` is missing.
        RunFailed: the evaluation failed.
    """
    run_yaml_in_child(render_config(config), "eval")
    return HeldOutLoss(json.loads((Path(config.output_dir) / HELD_OUT).read_text(encoding="utf-8")))


def _format_value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.4g}"
