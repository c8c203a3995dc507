"""A page with the Pareto front of memory and speed, and the strategies on it."""

from __future__ import annotations

import html
from collections.abc import Sequence

from toolkit.tune.judge import GB, Judged
from toolkit.tune.search import pareto

WIDTH, HEIGHT, EDGE = 760, 420, 60
STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em 1em;text-align:right}"
    "td:first-child{text-align:left}"
)


def render_page(title: str, judged: Sequence[Judged]) -> str:
    """HTML that needs nothing else."""
    front = pareto(judged)
    rows = "".join(
        f"<tr><td>{html.escape(one.candidate.name)}</td><td>{one.speed:,.0f}</td><td>{max(one.memory) / GB:.1f}</td></tr>"
        for one in front
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}"
        f"</h1><p>Every point is a strategy that fits, by formula; red ones no other beats in both.</p>{_picture(judged, front)}"
        f"<table><tr><th>strategy</th><th>tokens/s/device</th><th>GB of the fullest stage</th></tr>{rows}</table>\n"
    )


def _picture(judged: Sequence[Judged], front: Sequence[Judged]) -> str:
    memory, speed = max(max(one.memory) for one in judged), max(one.speed for one in judged)

    def point(one: Judged, colour: str, size: int) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * max(one.memory) / memory
        y = HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * one.speed / speed
        label = html.escape(f"{one.candidate.name}: {one.speed:,.0f} tokens/s/device, {max(one.memory) / GB:.1f} GB")
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}"><title>{label}</title></circle>'

    points = [point(one, "#9ab", 3) for one in judged] + [point(one, "#c33", 5) for one in front]
    axes = (
        f'<path d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}" fill="none" stroke="#333"/>'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 25}" text-anchor="end">GB of the fullest stage, up to {memory / GB:.0f}</text>'
        f'<text x="{EDGE}" y="{EDGE - 15}">tokens/s/device, up to {speed:,.0f}</text>'
    )
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{axes}{"".join(points)}</svg>'
