"""The page of a dry run: memory over time, what fills it at the peak, the largest blocks. One file that needs no network."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mindllm.compiled.simulation.simulation import CATEGORIES
from mindllm.config import RunConfig
from mindllm.dry_run.forecast import StageMemory
from mindllm.dry_run.moments import Fill, Use, by_category, bytes_of
from mindllm.dry_run.profile import Profile
from mindllm.dry_run.report import about_planned, about_routing
from mindllm.dry_run.source_lines import Lines, line_of
from mindllm.dry_run.workspace import attention_elements_of, peak_with_workspace
from mindllm.terminal.page import fill, mark, round_ticks
from mindllm.units import GIB, Gigabytes, device_memory, gigabytes

PAGE = "memory.html"
TEMPLATE = Path(__file__).with_name("page.html")
COLOURS = dict(zip(CATEGORIES, ("#3b6fb6", "#7aa6d8", "#8e6bbf", "#e08a3c", "#4aa37c", "#a7a7a7"), strict=True))
SOURCE = "<th>source</th>"
ROWS = 40
WIDTH, HEIGHT, LEFT, RIGHT = 1100, 220, 60, 330  # of a picture, in pixels; at the right the figures of bars


@dataclass(frozen=True)
class Section:
    """What the page says of a stage, or of a rank; sizes are bytes.

    ``exact``: whether ``shown`` is the simulation of it, and not of something smaller.
    """

    name: str
    about: str
    peak: Fill
    actual_peak: int
    workspace: int
    shown: Profile
    exact: bool

    @property
    def used_peak(self) -> int:
        return bytes_of(self.peak)


def render_page(
    memories: Sequence[StageMemory], config: RunConfig, limit: int, lines: Lines, to_proof: bool = False
) -> str:
    """Returns the page of the stages of a run as HTML; ``to_proof``: with the way back to the proof of the run beside it."""
    title = f"{config.trainer.model_name or 'Run'}: memory of each pipeline stage"
    return render_sections(title, [_section(memory, config) for memory in memories], limit, lines, to_proof)


def render_sections(title: str, sections: Sequence[Section], limit: int, lines: Lines, to_proof: bool = False) -> str:
    """Returns the page as HTML."""
    body = [_overview(sections, limit), *(_details(section, limit, lines) for section in sections)]
    markup = {"mark": mark("memory", to_proof), "legend": _legend(), "body": "\n".join(body)}
    return fill(TEMPLATE, {"title": title}, markup)


def _section(memory: StageMemory, config: RunConfig) -> Section:
    stage = memory.stage
    return Section(
        name=f"stage {stage.number}",
        about=f"rank {stage.rank}, {stage.layers} layers ({stage.recompute}), {stage.alive} micro-batches alive; "
        f"{'; '.join(filter(None, [memory.method, about_planned(memory), about_routing(config)]))}",
        peak=memory.peak,
        actual_peak=memory.actual_peak,
        workspace=peak_with_workspace(memory.moments, attention_elements_of(config)) - memory.used_peak,
        shown=memory.shown,
        exact=memory.exact,
    )


def _legend() -> str:
    return "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in COLOURS.items())


def _overview(sections: Sequence[Section], limit: int) -> str:
    """A bar for each, the limit a line across all of them."""
    most = max(limit, *(section.actual_peak for section in sections)) * 1.02
    step, bars = 30, []
    gb = gigabytes(section.actual_peak for section in sections)
    for row, section in enumerate(sections):
        y, x = row * step, float(LEFT)
        bars.append(f'<text x="0" y="{y + 18}">{escape(section.name)}</text>')
        for category, size in by_category(section.peak).items():
            width = size / most * (WIDTH - LEFT - RIGHT)
            hint = f"{category}: {gb(size)} GB"
            bars.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="20" fill="{COLOURS[category]}">'
                f"<title>{hint}</title></rect>"
            )
            x += width
        figures = (
            f"{gb(section.used_peak)} GB, with fragments {gb(section.actual_peak)} GB, "
            f"workspace ≈ {gb(section.workspace)} GB"
        )
        bars.append(f'<text class="figures" text-anchor="end" x="{WIDTH}" y="{y + 18}">{figures}</text>')
    at = LEFT + limit / most * (WIDTH - LEFT - RIGHT)
    height = len(sections) * step
    bars.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}"/>')
    bars.append(
        f'<text class="limit" text-anchor="end" x="{at - 4:.1f}" y="{height + 14}">limit {device_memory(limit)}</text>'
    )
    return f'<div class="picture"><svg viewBox="0 0 {WIDTH} {height + 20}">{"".join(bars)}</svg></div>'


def _details(section: Section, limit: int, lines: Lines) -> str:
    name = section.name[:1].upper() + section.name[1:]
    head = f"<h2>{escape(name)} <small>{escape(section.about)}</small></h2>"
    over_time = _over_time(section.shown, limit if section.exact else None, section.exact)
    parts = [head, over_time, _uses(section.peak, lines)]
    if section.exact:
        parts.append(_blocks(section.shown, lines))
    return f"<section>{''.join(parts)}</section>"


def _over_time(profile: Profile, limit: int | None, exact: bool) -> str:
    """Bytes in use over the events of the step."""
    points = profile.timeline
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    most = max(profile.used_peak, limit if limit and limit < 1.5 * profile.used_peak else 0) * 1.05

    def place(time: int, used: int) -> str:
        x = LEFT + (time - first) / (last - first) * (WIDTH - LEFT)
        return f"{x:.1f},{HEIGHT - used / most * HEIGHT:.1f}"

    steps = itertools.pairwise(points)
    corners = [place(*points[0]), *(f"{place(b[0], a[1])} {place(*b)}" for a, b in steps)]
    area = f"{place(first, 0)} {' '.join(corners)} {place(last, points[-1][1])} {place(last, 0)}"
    peak_x, peak_y = place(profile.peak_time, profile.used_peak).split(",")
    unit = GIB if exact else profile.used_peak / 100  # the height of something smaller is not that of the stage
    marks = "".join(
        f'<text x="{LEFT - 8}" text-anchor="end" y="{HEIGHT - tick * unit / most * HEIGHT + 4:.0f}">{tick:,g}</text>'
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{(y := HEIGHT - tick * unit / most * HEIGHT):.0f}" y2="{y:.0f}"/>'
        for tick in round_ticks(most / unit, 5)
    )
    if limit and limit <= most:
        y = HEIGHT - limit / most * HEIGHT
        marks += f'<line class="limit" x1="{LEFT}" x2="{WIDTH}" y1="{y:.0f}" y2="{y:.0f}"/>'
        marks += f'<text class="limit" x="{LEFT + 6}" y="{y - 5:.0f}">limit {device_memory(limit)}</text>'
    of, what = "GB", ""
    if not exact:
        of, what = (
            "% of the peak",
            " of the largest of the smaller simulations; its shape is that of the stage, its height is not",
        )
    times = f'<text text-anchor="end" x="{WIDTH}" y="{HEIGHT + 20}">the operators of a step, one after another</text>'
    return (
        f"<h3>Memory over time, {of}<small>{what}</small></h3>"
        f'<svg viewBox="0 -12 {WIDTH} {HEIGHT + 40}"><polygon class="area" points="{area}"/>{marks}{times}'
        f'<circle cx="{peak_x}" cy="{peak_y}" r="4"><title>peak: {device_memory(profile.used_peak)}</title></circle></svg>'
    )


def _uses(peak: Fill, lines: Lines) -> str:
    """Every megabyte of the peak: the largest uses, and the sum of the others by category."""
    largest, used = sorted(peak.items(), key=lambda item: -item[1]), bytes_of(peak)
    gb = gigabytes(size for _, size in largest[-1:])  # the smallest is to be read, too
    rows = [_use_row(use, size, used, lines, gb) for use, size in largest[:ROWS]]
    for category in CATEGORIES:
        others = [size for use, size in largest[ROWS:] if use.category == category]
        if others:
            rest = Use(category, f"{len(others)} smaller ones", "", False)
            rows.append(_use_row(rest, sum(others), used, lines, gb))
    names = "<th>GB</th><th>share</th><th>category</th><th>layer or parameter</th><th>operator</th>"
    head = f"<tr>{names}{SOURCE * bool(lines)}</tr>"
    total = f"<tr class=total><td>{gb(used)}</td><td>100 %</td><td colspan=4>used peak</td></tr>"
    return f"<h3>What is alive at the peak</h3><table>{head}{''.join(rows)}{total}</table>"


def _use_row(use: Use, size: int, peak: int, lines: Lines, gb: Gigabytes) -> str:
    operator = f"{use.operator}{' (backward)' if use.backward and use.operator else ''}" or "–"
    cells = (
        gb(size),
        f"{size / peak:.1%}",
        f'<i style="background:{COLOURS[use.category]}"></i>{use.category}',
        f"<code>{escape(use.path)}</code>",
        escape(operator),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}{_source(use, lines)}</tr>"


def _source(use: Use, lines: Lines) -> str:
    """The cell with the source line; none where nobody asked for lines."""
    return f"<td><code>{escape(line_of(use, lines))}</code></td>" if lines else ""


def _blocks(profile: Profile, lines: Lines) -> str:
    """The largest single blocks."""
    head = f"<tr><th>GB</th><th>operator or parameter</th><th>written</th><th>freed</th>{SOURCE * bool(lines)}</tr>"
    rows = "".join(_block_rows(profile, lines))
    summary = f"<summary>the {len(profile.largest)} largest blocks</summary>"
    return f"<details>{summary}<table>{head}{rows}</table></details>"


def _block_rows(profile: Profile, lines: Lines) -> Iterator[str]:
    gb = gigabytes(block.size for block in profile.largest[-1:])
    for block in profile.largest:
        freed = "–" if block.end is None else block.end
        yield (
            f"<tr><td>{gb(block.size)}</td><td><code>{escape(block.node)}</code></td><td>{block.start}</td>"
            f"<td>{freed}</td>{_source(block.use, lines)}</tr>"
        )
