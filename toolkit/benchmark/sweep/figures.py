"""What a point showed, by mode: figures from the files that its run left, and from what its commands printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig
from mindllm.errors import RunFailed
from mindllm.outside import parse_json
from mindllm.train.metrics_file import read_metrics

METRICS = "metrics.jsonl"
Figures = dict[str, float | int | None]
MEASURED = (
    "tokens_per_s",
    "step_p50_s",
    "step_p95_s",
    "compile_s",
    "peak_memory_mb",
    "step_memory_mb",
    "trained_parameters",
)
COLUMNS = {
    "measure": MEASURED,
    "tune": ("train_loss", "held_out_loss", *MEASURED),
    "dry": ("peak_memory_mb", "weights_mb", "optimizer_mb", "activations_mb", "step_s", "tokens_per_s_per_device"),
}
LAST_PART = 10  # the training loss is the mean of the last tenth of the steps


def of_size(config: RunConfig) -> Figures:
    """What is known before anything runs."""
    architecture = config.model.config.architecture
    return {
        "parameters": architecture.parameter_count(),
        "trained_parameters": architecture.trained_parameter_count(),
        "tokens_per_step": config.global_batch_size * config.model.config.seq_length,
    }


def of_steps(records: Sequence[Mapping[str, Any]], warmup: int) -> Figures:
    """Speed of the steps after ``warmup``, and what the first one took longer: compiling.

    Raises:
        RunFailed: there are no steps behind the warm-up.
    """
    counted = [record for record in records if record["step"] > warmup]
    if not counted:
        raise RunFailed(f"{len(records)} steps were run, all of them warm-up")
    seconds = [record["step_time_s"] for record in counted]
    positions = counted[0]["tokens_per_s"] * counted[0]["step_time_s"]
    middle = statistics.median(seconds)
    return {
        "steps_counted": len(counted),
        "step_p50_s": middle,
        "step_p95_s": percentile(seconds, 95),
        "tokens_per_s": positions / middle,
        "compile_s": max(0.0, records[0]["step_time_s"] - middle),
        "last_loss": counted[-1]["loss"],
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def of_run(directory: Path, warmup: int, tunes: bool) -> Figures:
    """Those of a run that trained in ``directory``; of one that ``tunes`` with losses and scores."""
    records = read_metrics(directory / METRICS)
    figures = of_steps(records, warmup)
    if not tunes:
        return figures
    last = records[-max(1, len(records) // LAST_PART) :]
    figures["train_loss"] = statistics.fmean(record["loss"] for record in last)
    evaluations = directory / "evaluation.jsonl"
    figures["held_out_loss"] = read_metrics(evaluations)[-1]["loss"] if evaluations.is_file() else None
    return figures | next((record["scores"] for record in reversed(records) if "scores" in record), {})


def of_dry_run(printed: str) -> Figures:
    """Memory of the fullest stage, by ``python -m toolkit.dry_run --json``."""
    stage = max(_object(printed)["stages"], key=lambda one: one["actual_peak_mb"])
    names = ("weights_mb", "optimizer_mb", "gradients_mb", "activations_mb", "used_peak_mb")
    return {"peak_memory_mb": stage["actual_peak_mb"], **{name: stage[name] for name in names}}


def of_step_time(printed: str) -> Figures:
    """Time of a step, by ``mindllm time --json``."""
    step = _object(printed)
    return {
        "step_s": step["seconds"],
        "tokens_per_s_per_device": step["tokens_per_second_per_device"],
        "model_flops_utilisation": step["model_flops_utilisation"],
    }


def left_out(printed: str) -> str:
    """What the predicted time leaves out; empty where nothing."""
    missing = _object(printed)["not_counted"]
    return f"step_s leaves out {'; '.join(missing)}" if missing else ""


def _object(printed: str) -> Mapping[str, Any]:
    """The object that a command printed, whatever it said before."""
    start = printed.find("{")
    if start < 0:
        raise RunFailed("it printed no figures")
    found: Mapping[str, Any] = parse_json(printed[start:])
    return found
