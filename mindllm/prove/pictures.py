"""Pictures on the page of a proof, of boxes and lines that scale with it: memory and time of stages as bars, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from mindllm.architecture.layer_counts import IN_PIECES, ZERO_BUBBLE_V
from mindllm.planning.reports.picture import COLOURS, Window, picture_windows
from mindllm.schedules.operations import NAMES
from mindllm.schedules.simulate import Timeline
from mindllm.timing.pass_times import PassTimes
from mindllm.units import GIB, TENTHS_OF_GB

MEMORY = {
    "weights": "#3b6fb6",
    "optimizer state": "#7aa6d8",
    "gradients": "#8e6bbf",
    "activations": "#e08a3c",
    "communication buffers": "#4aa37c",
    "other": "#a7a7a7",
    "workspace": "#d3b96a",
    "by formula": "#8296b0",
}
TIME = {
    "compute": "#4878a8",
    "recomputation": "#93b5d6",
    "exchanges within layers": "#d98c3f",
    "sends": "#b4574f",
    "replicas": "#8e6bbf",
    "update": "#5a9e6f",
    "bubble and rest": "#c3c9d2",
}
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", ZERO_BUBBLE_V: "zero bubble in a V"} | {name: name for name in IN_PIECES}
RECOMPUTATION = "recomputation"  # as the model of time calls it among the classes of operators
HEIGHT, LEAST, TOTAL = 24.0, 1.5, 288.0  # of a row, of one among many, and of all rows together, in pixels
LETTERS = 13  # pixels of a row from which on it has a label of its own
NUMBERED = 0.016  # of a picture's width from which on an operation shows its micro-batch
FAINT = 0.55  # by which the last chunk is lighter than the first
Said = Callable[[float], str]


@dataclass(frozen=True)
class Bar:
    """A row: parts by name, whose sizes add up, and what stands beside it."""

    label: str
    parts: Mapping[str, float]
    figure: str
    over: bool = False

    @property
    def size(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def memory_bars(figures: Mapping[str, Any]) -> str:
    """Return the memory of every stage beside the limit; empty where it is not known."""
    limit = figures.get("usable", figures.get("limit", 0))
    rows = [
        Bar(f"stage {stage['stage']}", _filled_by(stage), f"{TENTHS_OF_GB(stage['peak'])} GB", stage["peak"] > limit)
        for stage in figures.get("stages", ())
    ]
    name = f"{'usable' if figures.get('reserved') else 'limit'} {limit / GIB:.4g} GB"
    return _bars(rows, MEMORY, lambda size: f"{size / GIB:.2f} GB", limit, name) if rows else ""


def _filled_by(stage: Mapping[str, Any]) -> dict[str, float]:
    if "categories" not in stage:
        return {"by formula": stage["peak"]}
    return {**stage["categories"], "workspace": stage["workspace"]}


def time_bars(figures: Mapping[str, Any]) -> str:
    """Return the seconds of a step on every stage, by cause; empty where they are not known."""
    rows = []
    for stage in figures.get("stages", ()):
        parts = _spent_on(stage)
        waiting = parts["bubble and rest"] / figures["seconds"]
        rows.append(Bar(f"stage {stage['stage']}", parts, f"{waiting:.1%} idle"))
    return _bars(rows, TIME, lambda seconds: f"{seconds:.3f} s") if rows else ""


def _spent_on(stage: Mapping[str, Any]) -> dict[str, float]:
    repeated = stage["compute"].get(RECOMPUTATION, 0.0)
    sizes = (
        sum(stage["compute"].values()) - repeated,
        repeated,
        sum(stage["exchanged"].values()),
        stage["sends"],
        stage["replicas"],
        stage["update"],
        max(0.0, stage["bubble"]),
    )
    return dict(zip(TIME, sizes, strict=True))


def _bars(
    rows: Sequence[Bar], colours: Mapping[str, str], said: Said, limit: float | None = None, name: str = ""
) -> str:
    """Bars below each other with a legend; ``said`` gives a size in words, ``limit`` is a line across all of them."""
    most = max([row.size for row in rows] + ([limit] if limit else [])) * (1.03 if limit else 1.0) or 1.0
    height, every = row_height(len(rows))
    lines = "".join(_bar(row, colours, most, said, number % every == 0) for number, row in enumerate(rows))
    line = f'<b class="limit" style="left:{limit / most:.2%}"></b>' if limit else ""
    across = f'<div class="across"><span>{line}</span></div>' if limit else ""
    shown = [part for part in colours if any(row.parts.get(part, 0.0) > most / 2000 for row in rows)]
    keys = "".join(f'<span><i style="background:{colours[part]}"></i>{part}</span>' for part in shown)
    keys += f'<span class="of-limit"><i></i>{escape(name)}</span>' if limit else ""
    return f'<div class="bars" style="--row:{height:.4g}px">{lines}{across}</div><p class="legend">{keys}</p>'


def _bar(row: Bar, colours: Mapping[str, str], most: float, said: Said, labelled: bool) -> str:
    parts = "".join(
        f'<i style="width:{size / most:.3%};background:{colours.get(part, "#a7a7a7")}" title="{escape(part)}: {said(size)}"></i>'
        for part, size in row.parts.items()
        if size > 0
    )
    label, figure = (escape(row.label), escape(row.figure)) if labelled else ("", "")
    over = " over" * row.over
    return f'<div class="bar{over}"><span>{label}</span><span class="track">{parts}</span><span>{figure}</span></div>'


def row_height(count: int) -> tuple[float, int]:
    """Return the pixels of a row among so many, and every how many rows one has a label."""
    height = max(LEAST, min(HEIGHT, TOTAL / count))
    return height, 1 if height >= LETTERS else math.ceil(LETTERS / height)


def schedule(figures: Mapping[str, Any]) -> str:
    """Return the schedule of a step on all stages: whole, or its start, one period, and its end; empty without a pipeline."""
    if "passes" not in figures or figures["passes"]["stages"] < 2:
        return ""
    times = PassTimes.of_tree(figures["passes"])
    line = times.simulated()
    windows = picture_windows(line)
    height, every = row_height(times.stages)
    labels = "".join(
        f'<text x="100%" y="{(stage + 0.5) * height:.1f}">{stage}</text>' for stage in range(0, times.stages, every)
    )
    size = f'height="{times.stages * height:.4g}"'
    whole = sum(end - start for start, end, _ in windows)
    parts = "".join(_window(times, line, window, height, (window[1] - window[0]) / whole) for window in windows)
    return f'<div class="schedule"><figure class="stages"><svg {size}>{labels}</svg></figure>{parts}</div>{_key(times, line)}'


def _window(times: PassTimes, line: Timeline, window: Window, height: float, share: float) -> str:
    first, last, shows = window
    drawn = "".join(_operations(times, line, first, last, height, NUMBERED / share))
    left = line.repeated * line.period if first and shows != "one period" else 0.0
    when = f'<span class="when">{first + left:.3g} to {last + left:.3g} s</span>'
    middle = ' class="middle"' * (share < 0.2)
    svg = f'<svg height="{times.stages * height:.4g}">{drawn}</svg>'
    return f'<figure{middle} style="flex:{share:.3f}">{svg}<figcaption>{f"{shows}, " * bool(shows)}{when}</figcaption></figure>'


def _operations(
    times: PassTimes, line: Timeline, first: float, last: float, height: float, numbered: float
) -> Iterator[str]:
    """Yield a box for each operation between two moments, with its micro-batch where it is wide enough."""
    table = line.table
    for index in np.flatnonzero((line.end > first) & (line.start < last)):
        chunk, stage = divmod(int(table.place[index]), times.stages)
        start, end = ((float(moment[index]) - first) / (last - first) for moment in (line.start, line.end))
        wide, y = end - start, stage * height
        fill = lighter(COLOURS[int(table.what[index])], FAINT * chunk / max(1, times.chunks - 1))
        box = f'y="{y + height / 12:.4g}" height="{height / 1.2:.4g}" fill="{fill}"'
        yield f'<rect x="{start:.3%}" width="{wide:.3%}" {box}/>'
        if wide > numbered and height >= LETTERS and start >= 0 and end <= 1:
            yield f'<text x="{start + wide / 2:.3%}" y="{y + height / 2:.4g}">{table.micro[index]}</text>'


def _key(times: PassTimes, line: Timeline) -> str:
    shown = sorted(set(line.table.what.tolist()))
    keys = [f'<span><i style="background:{COLOURS[what]}"></i>{NAMES[what]}</span>' for what in shown]
    if times.chunks > 1:
        keys.append(f"<span>lighter: later ones of {times.chunks} chunks</span>")
    return f'<p class="legend">{"".join(keys)}</p>'


def lighter(colour: str, share: float) -> str:
    """Return a colour ``#rrggbb`` a share of its way to white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def schedule_words(figures: Mapping[str, Any]) -> str:
    """Return what the schedule is of, in words."""
    if "passes" not in figures:
        return ""
    times = PassTimes.of_tree(figures["passes"])
    chunks = f" of {times.chunks} chunks" if times.chunks > 1 else ""
    rounds = figures.get("accumulation", 1)
    again = f", {rounds} times a step" if rounds > 1 else ""
    pieces = f" of {times.pieces} pieces" if times.pieces > 1 else ""
    micro = f"{times.micro_batches:,} micro-batches{pieces}"
    return f"{SCHEDULES[times.schedule]}, {times.stages} stages{chunks}, {micro}{again}"
