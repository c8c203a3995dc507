"""The page of a dry run: memory over time, what fills it at the peak, the largest blocks. One file that needs no network."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from mindllm.compiled.simulation import CATEGORIES
from mindllm.config import RunConfig
from toolkit.dry_run.forecast import StageMemory
from toolkit.dry_run.moments import Use
from toolkit.dry_run.profile import Profile
from toolkit.dry_run.source_lines import Lines, line_of
from toolkit.dry_run.workspace import peak_with_workspace

MIB = 1 << 20
TEMPLATE = Path(__file__).with_name("page.html")
COLOURS = dict(zip(CATEGORIES, ("#3b6fb6", "#7aa6d8", "#8e6bbf", "#e08a3c", "#4aa37c", "#a7a7a7"), strict=True))
ROWS = 40
WIDTH, HEIGHT, LEFT = 1100, 220, 60  # of a picture, in pixels


def render_page(memories: Sequence[StageMemory], config: RunConfig, limit: int, lines: Lines) -> str:
    """Returns the page as HTML."""
    what = "estimated memory" if any(memory.estimated for memory in memories) else "memory"
    title = escape(f"{config.trainer.model_name or 'Run'}: {what} of each pipeline stage")
    body = [_overview(memories, config, limit), *(_stage(memory, limit, lines) for memory in memories)]
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("TITLE", title).replace("LEGEND", _legend()).replace("BODY", "\n".join(body))


def _legend() -> str:
    return "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in COLOURS.items())


def _overview(memories: Sequence[StageMemory], config: RunConfig, limit: int) -> str:
    """A bar for each stage, the limit a line across all of them."""
    most = max(limit, *(memory.actual_peak for memory in memories)) * 1.02
    step, bars = 30, []
    for row, memory in enumerate(memories):
        y, x = row * step, float(LEFT)
        bars.append(f'<text x="0" y="{y + 18}">stage {memory.stage.number}</text>')
        for category, size in memory.by_category.items():
            width = size / most * (WIDTH - LEFT)
            hint = f"{category}: {size / MIB:.0f} MB"
            bars.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="20" fill="{COLOURS[category]}">'
                f"<title>{hint}</title></rect>"
            )
            x += width
        extra = peak_with_workspace(memory.moments, config) - memory.used_peak
        figures = (
            f"{memory.used_peak // MIB} MB, with fragments {memory.actual_peak // MIB}, workspace ≈ {extra // MIB}"
        )
        bars.append(f'<text class="on" x="{LEFT + 8}" y="{y + 18}">{figures}</text>')
    at = LEFT + limit / most * (WIDTH - LEFT)
    height = len(memories) * step
    bars.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}"/>')
    bars.append(
        f'<text class="limit" text-anchor="end" x="{at - 4:.1f}" y="{height + 14}">limit {limit // MIB} MB</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {height + 20}">{"".join(bars)}</svg>'


def _stage(memory: StageMemory, limit: int, lines: Lines) -> str:
    stage = memory.stage
    head = (
        f"<h2>Stage {stage.number} <small>rank {stage.rank}, {stage.layers} layers ({escape(stage.recompute)}), "
        f"{stage.alive} micro-batches alive; {escape(memory.method)}</small></h2>"
    )
    parts = [head, _over_time(memory.shown, limit if memory.exact else None, memory.exact), _uses(memory, lines)]
    if memory.exact:
        parts.append(_blocks(memory.shown, lines))
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
    marks = "".join(
        f'<text x="0" y="{HEIGHT - part * HEIGHT + 4:.0f}">{most * part / MIB:.0f}</text>'
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{HEIGHT - part * HEIGHT:.0f}" y2="{HEIGHT - part * HEIGHT:.0f}"/>'
        for part in (0.25, 0.5, 0.75)
    )
    if limit and limit <= most:
        y = HEIGHT - limit / most * HEIGHT
        marks += f'<line class="limit" x1="{LEFT}" x2="{WIDTH}" y1="{y:.0f}" y2="{y:.0f}"/>'
    what = (
        "" if exact else " of the largest of the smaller simulations; its shape is that of the stage, its height is not"
    )
    return (
        f"<h3>Memory over time, MB<small>{what}</small></h3>"
        f'<svg viewBox="0 -6 {WIDTH} {HEIGHT + 12}">{marks}<polygon class="area" points="{area}"/>'
        f'<circle cx="{peak_x}" cy="{peak_y}" r="4"><title>peak: {profile.used_peak / MIB:.1f} MB</title></circle></svg>'
    )


def _uses(memory: StageMemory, lines: Lines) -> str:
    """Every megabyte of the peak: the largest uses, and the sum of the others by category."""
    largest = sorted(memory.peak.items(), key=lambda item: -item[1])
    rows = [_use_row(use, size, memory.used_peak, lines) for use, size in largest[:ROWS]]
    for category in CATEGORIES:
        others = [size for use, size in largest[ROWS:] if use.category == category]
        if others:
            rest = Use(category, f"{len(others)} smaller ones", "", False)
            rows.append(_use_row(rest, sum(others), memory.used_peak, lines))
    head = (
        "<tr><th>MB</th><th>share</th><th>category</th><th>layer or parameter</th><th>operator</th><th>source</th></tr>"
    )
    total = f"<tr class=total><td>{memory.used_peak / MIB:.1f}</td><td>100 %</td><td colspan=4>used peak</td></tr>"
    return f"<h3>What is alive at the peak</h3><table>{head}{''.join(rows)}{total}</table>"


def _use_row(use: Use, size: int, peak: int, lines: Lines) -> str:
    operator = f"{use.operator}{' (backward)' if use.backward and use.operator else ''}" or "–"
    cells = (
        f"{size / MIB:.1f}",
        f"{size / peak:.1%}",
        f'<i style="background:{COLOURS[use.category]}"></i>{use.category}',
        f"<code>{escape(use.path)}</code>",
        escape(operator),
        f"<code>{escape(line_of(use, lines))}</code>",
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _blocks(profile: Profile, lines: Lines) -> str:
    """The largest single blocks."""
    head = "<tr><th>MB</th><th>operator or parameter</th><th>written</th><th>freed</th><th>source</th></tr>"
    rows = "".join(_block_rows(profile, lines))
    summary = f"<summary>the {len(profile.largest)} largest blocks</summary>"
    return f"<details>{summary}<table>{head}{rows}</table></details>"


def _block_rows(profile: Profile, lines: Lines) -> Iterator[str]:
    for block in profile.largest:
        freed = "–" if block.end is None else block.end
        yield (
            f"<tr><td>{block.size / MIB:.1f}</td><td><code>{escape(block.node)}</code></td><td>{block.start}</td>"
            f"<td>{freed}</td><td><code>{escape(line_of(block.use, lines))}</code></td></tr>"
        )
