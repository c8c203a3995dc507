"""A schedule as a picture: what every stage does when, above the memory it holds."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.errors import UserError
from mindllm.files import atomic_open, atomic_path
from mindllm.planning.plan import Evaluation
from mindllm.planning.schedules.orders import BACKWARD, FORWARD, WEIGHT

NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradient"}
COLOURS = {FORWARD: "#4878a8", BACKWARD: "#5a9e6f", WEIGHT: "#d98c3f"}
LABELLED = 700  # operations that get the number of their micro-batch
FORMATS = (".png", ".svg", ".html")


def draw_schedule(evaluation: Evaluation, path: Path) -> None:
    """Writes PNG, SVG or a page with the SVG and the plan, by the ending of ``path``."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a picture ends in {', '.join(FORMATS)}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = evaluation.problem.stages
    height = min(40.0, 2.2 + 0.32 * stages)
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(14, height + 4), sharex=True, constrained_layout=True, height_ratios=[height, 4]
    )
    _draw_operations(above, evaluation)
    _draw_memory(below, evaluation)
    if path.suffix == ".html":
        text = io.StringIO()
        figure.savefig(text, format="svg")
        with atomic_open(path) as file:
            file.write(_page(evaluation, text.getvalue()))
    else:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=110, format=path.suffix[1:])
    pyplot.close(figure)


def _draw_operations(axes: Any, evaluation: Evaluation) -> None:
    """One bar per operation; later chunks are lighter."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    line, problem = evaluation.line, evaluation.problem
    stage, chunk = line.table.place % problem.stages, line.table.place // problem.stages
    corners = np.stack([
        np.stack([x, stage + y], axis=1)
        for x, y in ((line.start, -0.4), (line.end, -0.4), (line.end, 0.4), (line.start, 0.4))
    ], axis=1)  # fmt: skip
    light = 0.55 * chunk / max(1, problem.chunks - 1)
    base = np.array([to_rgb(COLOURS[what]) for what in line.table.what])
    colours = base + (1 - base) * light[:, None]
    few = line.table.size <= LABELLED
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white" if few else "none", linewidths=0.6)
    )
    if few:
        for index in range(line.table.size):
            middle = (line.start[index] + line.end[index]) / 2
            axes.text(middle, stage[index], str(line.table.micro[index]), ha="center", va="center", fontsize=6)
    axes.set(ylabel="stage", ylim=(problem.stages - 0.4, -0.6), xlim=(0, line.makespan))
    axes.set_yticks(range(0, problem.stages, max(1, problem.stages // 16)))
    shown = sorted(set(line.table.what.tolist()))
    axes.legend(
        handles=[Patch(color=COLOURS[what], label=NAMES[what]) for what in shown],
        loc="upper center", ncols=len(shown), bbox_to_anchor=(0.5, 1.0), borderaxespad=-1.6, frameon=False,
    )  # fmt: skip
    bubble = 100 * evaluation.bubble.mean()
    title = f"{problem.name}: {problem.schedule}, {problem.stages} stages x {problem.chunks} chunk(s), {problem.micro_batches} "
    axes.set_title(f"{title}micro-batches, step {evaluation.step_time:,.6g}, bubble {bubble:.1f}%", pad=22)


def _draw_memory(axes: Any, evaluation: Evaluation) -> None:
    """What each stage holds over time, and the limits."""
    from matplotlib import colormaps

    problem = evaluation.problem
    activation = evaluation.costs.activation.reshape(problem.chunks, problem.stages)
    for stage in range(problem.stages):
        times, held = evaluation.line.memory_curve(stage, activation[:, stage])
        fixed = evaluation.peak_mb[stage] - held.max()
        colour = colormaps["viridis"](stage / max(1, problem.stages - 1))
        label = f"stage {stage}" if stage % max(1, problem.stages // 8) == 0 else None
        axes.step([0, *times], [fixed, *(fixed + held)], where="post", color=colour, linewidth=1, label=label)
    for limit in sorted({limit for limit in problem.per_stage("limit_mb") if np.isfinite(limit)}):
        axes.axhline(limit, color="firebrick", linestyle="--", linewidth=1)
    axes.set(xlabel="time", ylabel="memory, MB", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", ncols=4, fontsize=7)


def _page(evaluation: Evaluation, drawing: str) -> str:
    """The drawing and the plan by stage as a page that needs nothing else."""
    problem = evaluation.problem
    rows = []
    for stage in range(problem.stages):
        mine = range(stage, problem.places, problem.stages)
        names = [name for place in mine for name in evaluation.plan.places[place]]
        mix = ", ".join(f"{names.count(kind)} {kind}" for kind in problem.kind_names if kind in names)
        layers = "+".join(str(evaluation.plan.counts[place]) for place in mine)
        cells = (stage, layers, mix, f"{evaluation.peak_mb[stage]:,.0f}", f"{100 * evaluation.bubble[stage]:.1f}%")
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("stage", "layers", "recompute", "memory MB", "bubble"))
    style = "body{font-family:sans-serif}svg{width:100%;height:auto}td,th{padding:.2em .8em;text-align:right}"
    return (
        f"<!doctype html>\n<html><head><meta charset='utf-8'><title>{html.escape(problem.name)}</title>"
        f"<style>{style}</style></head><body>\n{drawing[drawing.index('<svg') :]}\n"
        f"<table><tr>{head}</tr>\n{chr(10).join(rows)}\n</table></body></html>\n"
    )
