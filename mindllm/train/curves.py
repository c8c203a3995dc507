"""Plots of the metrics of runs with matplotlib: losses and scores over steps, and the tokens of experts.

Tokens of experts are a strip per layer, experts over steps, relative to an even share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.files import atomic_path
from mindllm.train.metrics_file import read_metrics

SMOOTHING = 0.05  # weight of the newest step in the drawn average
COLUMNS = 4
MIN_SHARE, MAX_SHARE = 0.0, 2.0  # color range, relative to an even share


@dataclass(frozen=True)
class Run:
    """Records of the steps and evaluations of one run."""

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def read_run(directory: Path) -> Run:
    """Read the metrics in the output directory of a run.

    Raises:
        UserError: the directory has no metrics, or no step with a finite loss.
    """
    metrics, evaluations = directory / "metrics.jsonl", directory / "evaluation.jsonl"
    if not metrics.is_file():
        raise UserError(
            f"{metrics}: file does not exist; pass the output_dir of a run with the callback MetricsMonitor"
        )
    records = read_metrics(metrics)
    steps = [record for record in records if isinstance(record.get("loss"), float)]
    if not steps:
        problem = "no step has a finite loss" if records else "no step is finished yet"
        raise UserError(f"{metrics}: {problem}")
    return Run(directory.name, steps, read_metrics(evaluations) if evaluations.is_file() else [])


def draw(runs: list[Run], path: Path) -> None:
    """Plot the loss over steps: every step thin, the exponential average thick, held-out loss as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), constrained_layout=True)
    for index, run in enumerate(runs):
        _draw_run(axes, run, f"C{index}")
    axes.set(title=", ".join(run.name for run in runs), xlabel="step", ylabel="loss, nats per token")
    axes.title.set_parse_math(False)
    axes.grid(alpha=0.3)
    draw_scores(axes, runs)
    for label in axes.legend().get_texts():
        label.set_parse_math(False)  # a name with $ in it is not a formula
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)


def _draw_run(axes: Any, run: Run, color: str) -> None:
    steps = [record["step"] for record in run.steps]
    losses = [record["loss"] for record in run.steps]
    axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(losses), color=color, label=f"{run.name}: training (average)")
    if run.evaluations:
        points = [(record["step"], record["loss"]) for record in run.evaluations]
        axes.plot(*zip(*points, strict=True), "o", color=color, markeredgecolor="black", label=f"{run.name}: held-out")
        baseline = run.evaluations[-1]["unigram_loss"]
        if baseline is not None:
            axes.axhline(baseline, color=color, linestyle=":", label=f"{run.name}: unigram baseline")


def draw_scores(axes: Any, runs: list[Run]) -> None:
    """Plot task scores, if any, over a second axis at the right."""
    curves = [(run, name, _score_points(run, name)) for run in runs for name in _score_names(run)]
    if not curves:
        return
    right = axes.twinx()
    right.set_ylabel("score")
    for index, (run, name, points) in enumerate(curves):
        right.plot(*zip(*points, strict=True), "--s", color=f"C{len(runs) + index}", markersize=4)
        axes.plot([], [], "--s", color=f"C{len(runs) + index}", markersize=4, label=f"{run.name}: {name}")
    right.set_ylim(bottom=0)


def _score_names(run: Run) -> list[str]:
    return list(dict.fromkeys(name for record in run.steps for name in record.get("scores") or ()))


def _score_points(run: Run, name: str) -> list[tuple[int, float]]:
    scored = [(record["step"], record["scores"].get(name)) for record in run.steps if record.get("scores")]
    return [(step, value) for step, value in scored if value is not None]


def _smooth(values: list[float]) -> list[float]:
    average = values[0]
    averages: list[float] = []
    for value in values:
        average += max(SMOOTHING, 1 / (len(averages) + 1)) * (value - average)
        averages.append(average)
    return averages


def expert_shares(run: Run) -> dict[int, list[tuple[int, list[float], float]]]:
    """Return, by layer and step, the tokens of every expert over an even share, and the share of dropped choices.

    Raises:
        UserError: the metrics have no experts.
    """
    layers: dict[int, list[tuple[int, list[float], float]]] = {}
    for record in run.steps:
        for load in record.get("experts") or ():
            total = max(sum(load["tokens"]), 1)
            shares = [count * len(load["tokens"]) / total for count in load["tokens"]]
            layers.setdefault(load["layer"], []).append((record["step"], shares, load["dropped"] / total))
    if not layers:
        raise UserError(f"{run.name}: metrics without experts; pass a run of a mixture-of-experts model")
    return layers


def draw_experts(run: Run, path: Path) -> None:
    """Plot the tokens of experts of a run as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = expert_shares(run)
    columns = min(COLUMNS, len(layers))
    rows = math.ceil(len(layers) / columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(3.2 * columns, 2.4 * rows), squeeze=False, constrained_layout=True
    )
    places = list(grid.flat)
    for axes, (layer, loads) in zip(places, sorted(layers.items()), strict=False):
        strip = _draw_layer(axes, layer, loads)
    for axes in places[len(layers) :]:
        axes.set_visible(False)
    figure.colorbar(strip, ax=grid, label="tokens of an expert over an even share")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)


def _draw_layer(axes: Any, layer: int, loads: list[tuple[int, list[float], float]]) -> Any:
    steps = [step for step, _, _ in loads]
    columns = [shares for _, shares, _ in loads]
    experts = len(columns[0])
    dropped = sum(part for _, _, part in loads) / len(loads)
    strip = axes.imshow(
        list(zip(*columns, strict=True)),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, -0.5, experts - 0.5),
        vmin=MIN_SHARE,
        vmax=MAX_SHARE,
        cmap="viridis",
    )
    axes.set(title=f"layer {layer}, {dropped:.1%} dropped", xlabel="step", ylabel="expert")
    return strip
