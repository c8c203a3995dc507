"""A page with the Pareto front of memory and speed, and the strategies on it."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from mindllm.strategies.listing import AS_WRITTEN, DRY_RUN, Entry
from mindllm.strategies.search import pareto
from mindllm.terminal.page import fill, mark, round_ticks
from mindllm.timing.verdict import Room
from mindllm.units import GIB

WIDTH, HEIGHT, EDGE = 760, 420, 60
TEMPLATE = Path(__file__).with_name("page.html")


def render_page(title: str, entries: Sequence[Entry], limit: float, to_proof: bool = False) -> str:
    """Return the page as HTML that needs no other file; ``limit`` is the bytes of a device.

    ``to_proof``: with a link back to the proof of the run next to it.
    """
    front = pareto([entry for entry in entries if entry.fits])
    head = "".join(
        f"<th>{name}</th>" for name in ("strategy", "step s", "tokens/s/device", "GB of the fullest stage", "source")
    )
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(entry))}</tr>" for entry in front)
    table = f'<div class="table"><table><tr>{head}</tr>{rows}</table></div>'
    body = f"{_yaml_paragraph(entries, limit)}{_picture(entries, front, limit)}{table}"
    return fill(TEMPLATE, {"title": title}, {"mark": mark("search", to_proof), "body": body})


def _cells(entry: Entry) -> tuple[str, ...]:
    """Return a row of the table."""
    memory = f"{entry.peak / GIB:.1f}"
    return (
        entry.name,
        f"{entry.seconds:.2f}",
        f"{entry.speed:,.0f}",
        memory,
        f"{entry.source}, memory by {entry.memory_source}",
    )


def _yaml_paragraph(entries: Sequence[Entry], limit: float) -> str:
    """Return the paragraph about the YAML as it is."""
    hand = next((entry for entry in entries if entry.source == AS_WRITTEN), None)
    if hand is None:
        return ""
    fits = "fits" if hand.fits else f"does not fit: it {Room(hand.memory, limit)}"
    source = "in the dry run" if hand.memory_source == DRY_RUN else "by formula"
    return (
        f"<p>The YAML as it is, {html.escape(hand.candidate.name)} (the square), {html.escape(fits)}, {source}: "
        f"{hand.speed:,.0f} tokens/s/device.</p>"
    )


def _picture(entries: Sequence[Entry], front: Sequence[Entry], limit: float) -> str:
    # points on the edge of the frame would be cut
    memory = 1.03 * max(limit, *(entry.peak for entry in entries))
    speed = 1.05 * max(entry.speed for entry in entries)

    def place(size: float, rate: float) -> tuple[float, float]:
        return EDGE + (WIDTH - 2 * EDGE) * size / memory, HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * rate / speed

    def point(entry: Entry, kind: str, size: int) -> str:
        x, y = place(entry.peak, entry.speed)
        text = html.escape(
            f"{entry.name}: {entry.speed:,.0f} tokens/s/device, {entry.peak / GIB:.1f} GB, {entry.source}"
        )
        if entry.source != AS_WRITTEN:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" class="{kind}"><title>{text}</title></circle>'
        corner = f'x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"'
        return f'<rect {corner} class="hand"><title>{text}</title></rect>'

    drawn = [point(entry, "point", 3) for entry in entries] + [point(entry, "front", 5) for entry in front]
    x = place(limit, 0.0)[0]
    drawn.append(
        f'<path d="M{x:.1f} {EDGE}V{HEIGHT - EDGE}" class="limit"/>'
        f'<text x="{x - 5:.1f}" y="{EDGE + 14}" text-anchor="end" class="of-limit">limit {limit / GIB:.4g} GB</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{_axes(memory, speed, place)}{"".join(drawn)}</svg>'


def _axes(memory: float, speed: float, place: Callable[[float, float], tuple[float, float]]) -> str:
    """Return the frame with round ticks, grid lines and labels."""
    across = [(place(tick * GIB, 0.0)[0], tick) for tick in round_ticks(memory / GIB, 8)]
    upwards = [(place(0.0, tick)[1], tick) for tick in round_ticks(speed, 6)]
    lines = [f'<path d="M{x:.1f} {EDGE}V{HEIGHT - EDGE}" class="grid"/>' for x, _ in across]
    lines += [f'<path d="M{EDGE} {y:.1f}H{WIDTH - EDGE}" class="grid"/>' for y, _ in upwards]
    texts = [f'<text x="{x:.1f}" y="{HEIGHT - EDGE + 18}" text-anchor="middle">{tick:,g}</text>' for x, tick in across]
    texts += [f'<text x="{EDGE - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>' for y, tick in upwards]
    return (
        f'{"".join(lines)}<path d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}" class="axis"/>{"".join(texts)}'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 14}" text-anchor="end">memory of the fullest stage, GB</text>'
        f'<text x="{EDGE}" y="{EDGE - 18}">tokens/s/device</text>'
    )
