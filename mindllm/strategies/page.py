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
    front = pareto([one for one in entries if one.fits])
    head = "".join(
        f"<th>{name}</th>" for name in ("strategy", "step s", "tokens/s/device", "GB of the fullest stage", "source")
    )
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(one))}</tr>" for one in front)
    table = f'<div class="table"><table><tr>{head}</tr>{rows}</table></div>'
    body = f"{_of_yaml(entries, limit)}{_picture(entries, front, limit)}{table}"
    return fill(TEMPLATE, {"title": title}, {"mark": mark("search", to_proof), "body": body})


def _cells(one: Entry) -> tuple[str, ...]:
    """Return a row of the table."""
    memory = f"{one.peak / GIB:.1f}"
    return one.name, f"{one.seconds:.2f}", f"{one.speed:,.0f}", memory, f"{one.source}, memory by {one.memory_source}"


def _of_yaml(entries: Sequence[Entry], limit: float) -> str:
    """Return the paragraph about the YAML as it is."""
    hand = next((one for one in entries if one.source == AS_WRITTEN), None)
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
    memory = 1.03 * max(limit, *(one.peak for one in entries))
    speed = 1.05 * max(one.speed for one in entries)

    def place(size: float, rate: float) -> tuple[float, float]:
        return EDGE + (WIDTH - 2 * EDGE) * size / memory, HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * rate / speed

    def point(one: Entry, kind: str, size: int) -> str:
        x, y = place(one.peak, one.speed)
        text = html.escape(f"{one.name}: {one.speed:,.0f} tokens/s/device, {one.peak / GIB:.1f} GB, {one.source}")
        if one.source != AS_WRITTEN:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" class="{kind}"><title>{text}</title></circle>'
        corner = f'x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"'
        return f'<rect {corner} class="hand"><title>{text}</title></rect>'

    drawn = [point(one, "point", 3) for one in entries] + [point(one, "front", 5) for one in front]
    x = place(limit, 0.0)[0]
    drawn.append(
        f'<path d="M{x:.1f} {EDGE}V{HEIGHT - EDGE}" class="limit"/>'
        f'<text x="{x - 5:.1f}" y="{EDGE + 14}" text-anchor="end" class="of-limit">limit {limit / GIB:.4g} GB</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{_axes(memory, speed, place)}{"".join(drawn)}</svg>'


def _axes(memory: float, speed: float, place: Callable[[float, float], tuple[float, float]]) -> str:
    """The frame with round ticks, their lines, and what is on the axes."""
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
