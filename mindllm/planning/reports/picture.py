"""Schedules as pictures: the operations of every stage over time, above its memory.

A page (``.html``) has every operation, to zoom into. A PNG or SVG of a schedule with too many operations shows its start, one
period of its steady state, and its end, each with its time.
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
WIDE = 60.0  # operations of a stage that are readable next to each other
SHARES = (0.4, 0.2)  # of such a width, for start and end, and for the middle where nothing repeats
TICKS = 10  # on the axes of all stretches together
LABELLED = 1500  # operations that get the number of their micro-batch
LONGEST = 6  # times the micro-batches after which a schedule may repeat
REPEATED = 0.01  # of the time between two micro-batches, by which it may differ
LIGHTEST = 0.8  # of the colors of stages: lighter ones are too pale on white
EQUAL = 1e-9  # share of the step by which equal moments may differ
FORMATS = (".png", ".svg", ".html")

Window = tuple[float, float, str]  # start, end and title


def draw_schedule(evaluation: Evaluation, path: Path, note: str = "") -> None:
    """Write a PNG, SVG or page, by the ending of ``path``; ``note`` is added below its title."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a picture ends in {', '.join(FORMATS)}")
    if path.suffix == ".html":
        write_page(evaluation, path, KINDS, note)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    stages, windows = evaluation.problem.stages, picture_windows(evaluation.line)
    height = min(40.0, 2.2 + 0.32 * stages)
    figure, axes = pyplot.subplots(
        2, len(windows), figsize=(14, height + 4), sharex="col", sharey="row", squeeze=False, constrained_layout=True,
        gridspec_kw={"height_ratios": [height, 4], "width_ratios": [end - start for start, end, _ in windows]},
    )  # fmt: skip
    for column, window in enumerate(windows):
        _draw_operations(axes[0, column], evaluation, window)
        _draw_memory(axes[1, column], evaluation, window)
        share = (window[1] - window[0]) / sum(end - start for start, end, _ in windows)
        ticks = round(TICKS * share)
        axes[1, column].xaxis.set_major_locator(
            MaxNLocator(ticks) if ticks > 1 else FixedLocator([float(f"{sum(window[:2]) / 2:.3g}")])
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


def picture_windows(line: Timeline) -> list[Window]:
    """Return the windows of a still picture: the whole step, or the start, one period or the middle, and the end."""
    step, stages = float(line.end.max()), line.table.stages
    if not step:
        return [(0.0, 1.0, "")]
    slowest = int(line.busy().argmax())
    mine = line.table.place % stages == slowest
    usual = float(np.mean((line.end - line.start)[mine]))
    period = _period(line, slowest, stages if line.table.chunks > 1 else 1)
    start = max(SHARES[0] * WIDE * usual, 1.2 * line.end[np.isin(line.table.what, (BACKWARD, INPUT))].min())
    half = SHARES[1] * WIDE * usual / 2
    middle = (*period, "one period") if period else (step / 2 - half, step / 2 + half, "the middle")
    if step <= max(WIDE * usual, 2 * start + 2 * (middle[1] - middle[0])):
        return [(0.0, step, "")]
    return [(0.0, start, "start"), middle, (step - start, step, "end")]


def _period(line: Timeline, stage: int, micro_batches: int) -> tuple[float, float] | None:
    """Return the window from a forward pass in the middle of the step to its repetition, whole ``micro_batches`` later.

    None if it does not repeat within :data:`LONGEST` of them.
    """
    starts = line.start[(line.table.place == stage) & (line.table.what == FORWARD)]
    gaps, middle = np.diff(starts), len(starts) // 2 // micro_batches * micro_batches
    for length in range(micro_batches, (LONGEST + 1) * micro_batches, micro_batches):
        this, following = gaps[middle : middle + length], gaps[middle + length : middle + 2 * length]
        if len(following) == length and np.abs(this - following).max() <= REPEATED * this.mean():
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
        handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in shown], loc="outside lower center",
        ncols=len(shown), frameon=False,
    )  # fmt: skip


def _draw_operations(axes: Any, evaluation: Evaluation, window: Window) -> None:
    """Draw one bar per operation; later chunks are lighter."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    line, problem = evaluation.line, evaluation.problem
    first, last, title = window
    visible = np.flatnonzero((line.end > first) & (line.start < last))
    stage, chunk = line.table.place[visible] % problem.stages, line.table.place[visible] // problem.stages
    start, end = line.start[visible], line.end[visible]
    corners = np.stack([
        np.stack([x, stage + y], axis=1) for x, y in ((start, -0.4), (end, -0.4), (end, 0.4), (start, 0.4))
    ], axis=1)  # fmt: skip
    light = 0.55 * chunk / max(1, problem.chunks - 1)
    base = np.array([to_rgb(COLOURS[kind]) for kind in line.table.what[visible]]).reshape(-1, 3)
    colours = base + (1 - base) * light[:, None]
    few = len(visible) <= LABELLED
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white" if few else "none", linewidths=0.6)
    )
    for index in range(len(visible)) if few else ():
        middle = (start[index] + end[index]) / 2
        if first < middle < last:
            axes.text(
                middle, stage[index], str(line.table.micro[visible[index]]), ha="center", va="center", fontsize=6, clip_on=True
            )  # fmt: skip
    axes.set_xlim(first, last)
    if title:
        axes.set_title(title, fontsize=9)


def _draw_memory(axes: Any, evaluation: Evaluation, window: Window) -> None:
    """Draw the memory of each stage over time, and the limits."""
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
    """Return the memory of a stage over time: moments, and MB from each on; its maximum is the stage's peak."""
    activation = evaluation.costs.activation.reshape(evaluation.problem.chunks, evaluation.problem.stages)
    times, activations = evaluation.line.memory_curve(stage, activation[:, stage])
    fixed = evaluation.peak_mb[stage] - activations.max()
    lasting = np.append(np.diff(times) > EQUAL * times[-1], True)  # frees and allocations at one moment are one change
    return np.append(0.0, times[lasting]), np.append(fixed, fixed + activations[lasting])
