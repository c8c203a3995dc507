"""A schedule as a picture: what every stage does when, above the memory it holds.

A page (``.html``) holds every operation, to zoom into. A PNG or SVG of a schedule with more operations than can be told apart
shows its start, one period of its steady state, and its end, each with the time it stands for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mindllm.errors import UserError
from mindllm.files import atomic_path
from mindllm.planning.plan import Evaluation
from mindllm.planning.reports.schedule_page import write_page
from mindllm.schedules.operations import BACKWARD, FORWARD, INPUT, NAMES, WEIGHT
from mindllm.schedules.simulate import Timeline
from mindllm.units import GIB, MIB, device_memory

COLOURS = {FORWARD: "#4878a8", BACKWARD: "#5a9e6f", WEIGHT: "#d98c3f", INPUT: "#2f6f5e"}
KINDS = [(name, COLOURS[what]) for what, name in enumerate(NAMES)]
"""Name and colour by kind of operation."""
WIDE = 60.0  # operations of a stage that can be told apart side by side
SHARES = (0.4, 0.2)  # of such a width, for start and end, and for the middle where nothing repeats
TICKS = 10  # on the axes of all stretches together
LABELLED = 1500  # operations that get the number of their micro-batch
LONGEST = 6  # times the micro-batches after which a schedule may repeat
REPEATED = 0.01  # of the time between two micro-batches, by which it may differ
LIGHTEST = 0.8  # of the colours of stages: beyond that they are too pale on white
SAME = 1e-9  # of the step: moments that are one
FORMATS = (".png", ".svg", ".html")

Window = tuple[float, float, str]  # from, to, and what it shows


def draw_schedule(evaluation: Evaluation, path: Path, note: str = "") -> None:
    """Writes PNG, SVG or a page, by the ending of ``path``; ``note`` is one more sentence below its title."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a picture ends in {', '.join(FORMATS)}")
    if path.suffix == ".html":
        write_page(evaluation, path, KINDS, note)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    stages, windows = evaluation.problem.stages, windows_of(evaluation.line)
    height = min(40.0, 2.2 + 0.32 * stages)
    figure, axes = pyplot.subplots(
        2, len(windows), figsize=(14, height + 4), sharex="col", sharey="row", squeeze=False, constrained_layout=True,
        gridspec_kw={"height_ratios": [height, 4], "width_ratios": [end - start for start, end, _ in windows]},
    )  # fmt: skip
    for column, window in enumerate(windows):
        _draw_operations(axes[0, column], evaluation, window)
        _draw_memory(axes[1, column], evaluation, window)
        share = (window[1] - window[0]) / sum(end - start for start, end, _ in windows)
        wanted = round(TICKS * share)
        axes[1, column].xaxis.set_major_locator(
            MaxNLocator(wanted) if wanted > 1 else FixedLocator([float(f"{sum(window[:2]) / 2:.3g}")])
        )
        axes[1, column].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes[0, 0].set(ylabel="stage", ylim=(stages - 0.4, -0.6))
    axes[0, 0].set_yticks(range(0, stages, max(1, stages // 16)))
    axes[1, 0].set(ylabel="memory, GB", ylim=(0, None))
    axes[1, 0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes[1, -1].legend(loc="lower right", ncols=4, fontsize=7)
    _title(figure, evaluation, note)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format=path.suffix[1:])
    pyplot.close(figure)


def windows_of(line: Timeline) -> list[Window]:
    """The stretches of time that a still picture shows: all, or the start, one period or the middle, and the end."""
    whole, stages = float(line.end.max()), line.table.stages
    if not whole:
        return [(0.0, 1.0, "")]
    slowest = int(line.busy().argmax())
    mine = line.table.place % stages == slowest
    usual = float(np.mean((line.end - line.start)[mine]))
    period = _period(line, slowest, stages if line.table.chunks > 1 else 1)
    start = max(SHARES[0] * WIDE * usual, 1.2 * line.end[np.isin(line.table.what, (BACKWARD, INPUT))].min())
    half = SHARES[1] * WIDE * usual / 2
    middle = (*period, "one period") if period else (whole / 2 - half, whole / 2 + half, "the middle")
    if whole <= max(WIDE * usual, 2 * start + 2 * (middle[1] - middle[0])):
        return [(0.0, whole, "")]
    return [(0.0, start, "start"), middle, (whole - start, whole, "end")]


def _period(line: Timeline, stage: int, micro_batches: int) -> tuple[float, float] | None:
    """From a forward pass of the stage in the middle of the step to where those behind it repeat, whole ``micro_batches`` later.

    None where they do not within :data:`LONGEST` of them.
    """
    starts = line.start[(line.table.place == stage) & (line.table.what == FORWARD)]
    gaps, middle = np.diff(starts), len(starts) // 2 // micro_batches * micro_batches
    for length in range(micro_batches, (LONGEST + 1) * micro_batches, micro_batches):
        this, next_one = gaps[middle : middle + length], gaps[middle + length : middle + 2 * length]
        if len(next_one) == length and np.abs(this - next_one).max() <= REPEATED * this.mean():
            return float(starts[middle]), float(starts[middle + length])
    return None


def _title(figure: Any, evaluation: Evaluation, note: str) -> None:
    from matplotlib.patches import Patch

    problem = evaluation.problem
    shown = sorted(set(evaluation.line.table.what.tolist()))
    figure.suptitle(
        f"{problem.name}: {problem.pipeline}, step {evaluation.reported_step:,.6g}, bubble {100 * evaluation.bubble.mean():.1f}%"
        + f"\n{note}" * bool(note)
    )
    figure.legend(
        handles=[Patch(color=COLOURS[what], label=NAMES[what]) for what in shown], loc="outside lower center",
        ncols=len(shown), frameon=False,
    )  # fmt: skip


def _draw_operations(axes: Any, evaluation: Evaluation, window: Window) -> None:
    """One bar per operation; later chunks are lighter."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    line, problem = evaluation.line, evaluation.problem
    first, last, what_it_shows = window
    seen = np.flatnonzero((line.end > first) & (line.start < last))
    stage, chunk = line.table.place[seen] % problem.stages, line.table.place[seen] // problem.stages
    start, end = line.start[seen], line.end[seen]
    corners = np.stack([
        np.stack([x, stage + y], axis=1) for x, y in ((start, -0.4), (end, -0.4), (end, 0.4), (start, 0.4))
    ], axis=1)  # fmt: skip
    light = 0.55 * chunk / max(1, problem.chunks - 1)
    base = np.array([to_rgb(COLOURS[what]) for what in line.table.what[seen]]).reshape(-1, 3)
    colours = base + (1 - base) * light[:, None]
    few = len(seen) <= LABELLED
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white" if few else "none", linewidths=0.6)
    )
    for index in range(len(seen)) if few else ():
        middle = (start[index] + end[index]) / 2
        if first < middle < last:
            axes.text(
                middle, stage[index], str(line.table.micro[seen[index]]), ha="center", va="center", fontsize=6, clip_on=True
            )  # fmt: skip
    axes.set_xlim(first, last)
    if what_it_shows:
        axes.set_title(what_it_shows, fontsize=9)


def _draw_memory(axes: Any, evaluation: Evaluation, window: Window) -> None:
    """What each stage holds over time, and the limits."""
    from matplotlib import colormaps

    problem = evaluation.problem
    for stage in range(problem.stages):
        times, memory = stage_memory(evaluation, stage)
        colour = colormaps["viridis"](LIGHTEST * stage / max(1, problem.stages - 1))
        label = f"stage {stage}" if stage % max(1, problem.stages // 8) == 0 else None
        axes.step(times, memory * MIB / GIB, where="post", color=colour, linewidth=1, label=label)
    for limit in sorted({limit for limit in problem.per_stage("limit_mb") if np.isfinite(limit)}):
        label = f"limit {device_memory(limit, MIB)}"
        axes.axhline(limit * MIB / GIB, color="firebrick", linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="time", xlim=window[:2])
    axes.grid(alpha=0.3)


def stage_memory(evaluation: Evaluation, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory of a stage over time: moments, and MB from each on; its highest point is the stage's peak."""
    activation = evaluation.costs.activation.reshape(evaluation.problem.chunks, evaluation.problem.stages)
    times, held = evaluation.line.memory_curve(stage, activation[:, stage])
    fixed = evaluation.peak_mb[stage] - held.max()
    lasting = np.append(
        np.diff(times) > SAME * times[-1], True
    )  # what is freed and taken at one moment shows as one change
    return np.append(0.0, times[lasting]), np.append(fixed, fixed + held[lasting])
