"""What a run that trained or evaluated comes to: its losses, its directory, its last checkpoint, or the loss of held-out text."""

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
from mindllm.run.proved import find
from mindllm.terminal.progress import Progress, unwatched
from mindllm.terminal.tables import Table, figures
from mindllm.train.checkpoint import CheckpointStore
from mindllm.train.job.output_directory import CHECKPOINTS
from mindllm.train.metrics_file import METRICS_NAME, read_metrics

if TYPE_CHECKING:
    from mindllm.results import Part

HELD_OUT = "evaluation/held_out.json"
SHOWN = 10  # steps of a table


@dataclass(frozen=True)
class Ended:
    """How a run ended in this process.

    Attributes:
        results: names and values that are told when it is over.
        scores: the tables of tasks.
        failures: what went wrong and did not end the run.
        interrupted: whether it was asked to stop, and did after a step.
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
        records: of every step, those before a restart included, what ``metrics.jsonl`` has of it.
        checkpoint: the last one; None where none was saved.
    """

    config: RunConfig
    records: tuple[Mapping[str, Any], ...]
    checkpoint: Path | None

    @property
    def output_dir(self) -> Path:
        """The directory of the run."""
        return Path(self.config.output_dir)

    @property
    def losses(self) -> tuple[float | None, ...]:
        """The loss of every step, in nats per token; None where it was not finite."""
        return tuple(record["loss"] for record in self.records)

    @property
    def steps(self) -> int:
        """The last step."""
        return self.records[-1]["step"] if self.records else 0

    def summary(self) -> str:
        """Return steps and last loss."""
        return f"{self.steps} steps, loss {_figure(self.losses[-1] if self.losses else None)}"

    def tree(self) -> dict[str, Any]:
        """Return losses and places."""
        return {
            "output_dir": str(self.output_dir),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "steps": self.steps,
            "losses": list(self.losses),
        }

    def parts(self) -> Iterator[Part]:
        """Yield some steps, the last one among them, and where the run and its last checkpoint are."""
        last = len(self.records) - 1
        chosen = sorted({round(last * part / (SHOWN - 1)) for part in range(SHOWN)}) if self.records else []
        rows = [[str(self.records[at]["step"]), *map(_figure, _figures(self.records[at]))] for at in chosen]
        yield Table(f"{self.steps} steps", figures("step", "loss", "learning rate", "tokens/s"), rows)
        yield f"checkpoint: {self.checkpoint or 'none'}"
        yield f"run: {self.output_dir}"


@dataclass(frozen=True, repr=False)
class HeldOutLoss(Result):
    """The loss of a checkpoint on held-out text, or on pairs of answers; ``values`` has all that was computed."""

    values: Mapping[str, Any]

    @property
    def loss(self) -> float:
        """Nats per token, or per pair."""
        return self.values["loss"]

    def summary(self) -> str:
        """Return the loss."""
        return f"loss {self.loss:.4f}"

    def tree(self) -> dict[str, Any]:
        """Return loss, perplexity, bits per byte, tokens, the baseline, the split and the checkpoint."""
        return dict(self.values)

    def parts(self) -> Iterator[Part]:
        """Yield the line that the log has."""
        yield f"{self.values['checkpoint']} on the {self.values['split']} split: {self.values['text']}"


def train_in_child(config: RunConfig, progress: Progress = unwatched) -> Training:
    """Train in a process of its own; ``progress`` is told of steps.

    Raises:
        UserError: the configuration is wrong, or another run's results are in the output directory.
        RunFailed: training failed.
        CheckFailed: it requires a proof, and has none.
    """
    if config.require_proof:
        find(config)
    config = _with_metrics(config)
    directory = Path(config.output_dir)
    total = config.runner_config.stop_step or config.runner_config.train_steps
    seen = 0

    def look() -> None:
        nonlocal seen
        size = (directory / METRICS_NAME).stat().st_size if (directory / METRICS_NAME).is_file() else 0
        if size != seen and (records := read_metrics(directory / METRICS_NAME)):
            progress("training", records[-1]["step"], total)
        seen = size

    run_yaml_in_child(render_config(config), config.run_mode, look if progress is not unwatched else lambda: None)
    newest = CheckpointStore(directory / CHECKPOINTS).newest()
    return Training(config, tuple(read_metrics(directory / METRICS_NAME)), newest)


def evaluate_in_child(config: RunConfig) -> HeldOutLoss:
    """Find the loss of ``load_checkpoint`` on held-out text in a process of its own.

    Raises:
        UserError: the configuration is wrong, or names no checkpoint.
        RunFailed: the evaluation failed.
    """
    run_yaml_in_child(render_config(config), "eval")
    return HeldOutLoss(json.loads((Path(config.output_dir) / HELD_OUT).read_text(encoding="utf-8")))


def _with_metrics(config: RunConfig) -> RunConfig:
    """The run with the callback that writes the losses, which changes nothing else."""
    if any(isinstance(item, MetricsMonitorConfig) for item in config.callbacks):
        return config
    entries = [*config.model_dump(by_alias=True)["callbacks"], {"type": "MetricsMonitor"}]
    return override_config(config, {"callbacks": entries})


def _figures(record: Mapping[str, Any]) -> tuple[float | None, ...]:
    return record["loss"], record["learning_rate"], record["tokens_per_s"]


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.4g}"
