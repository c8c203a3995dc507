"""A page with the Pareto front of memory and speed, and the strategies on it."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from mindllm.strategies.judge import Judged
from mindllm.strategies.search import Planned, pareto
from mindllm.terminal.page import fill, mark, round_ticks
from mindllm.units import GIB

WIDTH, HEIGHT, EDGE = 760, 420, 60
TEMPLATE = Path(__file__).with_name("page.html")


def render_page(
    title: str, judged: Sequence[Judged], limit: float, hand: Planned | None, to_proof: bool = False
) -> str:
    """HTML that needs nothing else; ``hand`` is the YAML as it is, and ``limit`` the bytes of a device.

    ``to_proof``: with the way back to the proof of the run beside it.
    """
    front = pareto(judged)
    rows = "".join(
        f"<tr><td>{html.escape(one.candidate.name)}</td><td>{one.speed:,.0f}</td><td>{max(one.memory) / GIB:.1f}</td></tr>"
        for one in front
    )
    head = "<tr><th>strategy</th><th>tokens/s/device</th><th>GB of the fullest stage</th></tr>"
    table = f'<div class="table"><table>{head}{rows}</table></div>'
    body = f"{_of_yaml(hand, limit)}{_picture(judged, front, limit, hand)}{table}"
    return fill(TEMPLATE, {"title": title}, {"mark": mark("search", to_proof), "body": body})


def _of_yaml(hand: Planned | None, limit: float) -> str:
    """What the page says of the YAML as it is."""
    if hand is None:
        return ""
    room = hand.room(limit)
    fits = f"{'fits' if room.fits else f'does not fit: it {room}'}, {hand.source}"
    return (
        f"<p>The YAML as it is, {html.escape(hand.candidate.name)} (the square), {html.escape(fits)}: "
        f"{hand.step.tokens_per_device:,.0f} tokens/s/device.</p>"
    )


def _picture(judged: Sequence[Judged], front: Sequence[Judged], limit: float, hand: Planned | None) -> str:
    memory, speed = max(limit, *(max(one.memory) for one in judged)), max(one.speed for one in judged)
    if hand:
        memory, speed = max(memory, *hand.memory), max(speed, hand.step.tokens_per_device)
    memory, speed = 1.03 * memory, 1.05 * speed  # points on the edge of the frame would be cut

    def place(size: float, rate: float) -> tuple[float, float]:
        return EDGE + (WIDTH - 2 * EDGE) * size / memory, HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * rate / speed

    def label(name: str, size: float, rate: float) -> str:
        return html.escape(f"{name}: {rate:,.0f} tokens/s/device, {size / GIB:.1f} GB")

    def point(one: Judged, kind: str, size: int) -> str:
        x, y = place(max(one.memory), one.speed)
        text = label(one.candidate.name, max(one.memory), one.speed)
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" class="{kind}"><title>{text}</title></circle>'

    drawn = [point(one, "point", 3) for one in judged] + [point(one, "front", 5) for one in front]
    if hand:
        rate = hand.step.tokens_per_device
        x, y = place(max(hand.memory), rate)
        text = label("the YAML as it is", max(hand.memory), rate)
        drawn.append(
            f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" class="hand"><title>{text}</title></rect>'
        )
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
