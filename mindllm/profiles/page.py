"""The page of a recorded step: what each difference is worth, and the ranks beside their prediction."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindllm.files import atomic_open
from mindllm.profiles.compare import LEAST, Finding
from mindllm.profiles.report import LOOK, PARTS, ProfileReport, named, told
from mindllm.terminal.page import fill, mark, round_ticks

TEMPLATE = Path(__file__).with_name("page.html")
WIDTH, LINE, LEFT, RIGHT = 900, 22, 150, 90
MOST_RANKS = 64  # that are drawn; tables have all
FIGURES = ("s", "worth s", "of the step")
LEGEND = {"computing": "computing", "exposed": "exchanges that nothing hides", "bubble": "waiting between stages",
          "free": "nothing on the device"}  # fmt: skip


def write_page(report: ProfileReport, path: Path | str, title: str = "profile") -> None:
    """Write what a report says as a page, HTML that needs nothing else."""
    with atomic_open(Path(path)) as file:
        file.write(render_page(title, report))


def render_page(title: str, report: ProfileReport) -> str:
    """Return HTML that needs nothing else."""
    body = f"{_worth(report)}{_looks(report)}{_ranks(report)}{_notes(report)}"
    return fill(TEMPLATE, {"title": title, "headline": report.headline()}, {"mark": mark("profile"), "body": body})


def _worth(report: ProfileReport) -> str:
    if not report.findings:
        return f"<section><h2>Nothing differs</h2><p>by {LEAST:.1%} of the step or more.</p></section>"
    names = "".join(f"<th>{name}</th>" for name in ("cause", "where", "what"))
    head = names + "".join(f'<th class="figure">{name}</th>' for name in FIGURES)
    rows = "".join(_row(one, report.comparison.measured) for one in report.findings)
    note = "<small>In brackets: follows from the others.</small>" * any(one.consequence for one in report.findings)
    return (
        f"<section><h2>What each difference is worth</h2>{_bars(report.findings)}"
        f"<table><tr>{head}</tr>{rows}</table>{note}<p>{html.escape(report.remainder())}</p></section>"
    )


def _row(one: Finding, measured: float) -> str:
    worth = f"({one.worth:+.4f})" if one.consequence else f"{one.worth:+.4f}"
    figures = (f"{one.seconds:+.4f}", worth, f"{100 * one.worth / measured:+.1f}%")
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in (named(one), one.where, told(one)))
    cells += "".join(f'<td class="figure">{text}</td>' for text in figures)
    return f"<tr>{cells}</tr>"


def _bars(findings: Sequence[Finding]) -> str:
    """Bars of what findings are worth, to the right of nothing where the step would be shorter without them."""
    least, most = min(0.0, *(one.worth for one in findings)), max(0.0, *(one.worth for one in findings))
    scale = (WIDTH - 2 * LEFT - RIGHT) / ((most - least) or 1.0)
    zero = 2 * LEFT - least * scale
    drawn = [f'<path d="M{zero:.1f} 4V{LINE * len(findings) + 4}" class="axis"/>']
    for number, one in enumerate(findings):
        x, wide = min(zero, zero + one.worth * scale), abs(one.worth) * scale
        kind = f"{'more' if one.worth > 0 else 'less'}{' follows' * one.consequence}"
        y = LINE * number + 6
        label = f"{named(one)}{f', {one.where}' if one.where else ''}"
        drawn.append(f'<text x="0" y="{y + 12}">{html.escape(label)}</text>')
        drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="14" class="{kind}"/>')
        drawn.append(f'<text x="{max(zero, x + wide) + 6:.1f}" y="{y + 12}" class="figure">{one.worth:+.4f} s</text>')
    return f'<svg viewBox="0 0 {WIDTH} {LINE * len(findings) + 10}">{"".join(drawn)}</svg>'


def _looks(report: ProfileReport) -> str:
    causes = list(dict.fromkeys(one.cause for one in report.findings))
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(LOOK[cause].replace('`', ''))}</td></tr>"
        for cause in causes
        for name in dict.fromkeys(named(one) for one in report.findings if one.cause == cause)
    )
    return f"<section><h2>What to look at</h2><table>{rows}</table></section>" if rows else ""


def _ranks(report: ProfileReport) -> str:
    """Every rank as two bars, recorded and predicted, on one axis of seconds."""
    ranks = report.tree()["ranks"]
    shown = ranks[:MOST_RANKS]
    longest = max(max(one["seconds"], sum(one["predicted"][name] for name in PARTS)) for one in shown)
    scale = (WIDTH - LEFT - RIGHT) / longest
    drawn: list[str] = []
    for number, one in enumerate(shown):
        y = 2.6 * LINE * number
        label = f"rank {one['rank']}, stage {one['stage']}"
        drawn += _bar(y + 4, label, one, scale)
        drawn += _bar(y + 4 + LINE, "predicted", one["predicted"], scale)
    height = 2.6 * LINE * len(shown)
    for tick in round_ticks(longest):
        x = LEFT + tick * scale
        drawn.append(f'<path d="M{x:.1f} 0V{height:.1f}" class="axis"/>')
        drawn.append(f'<text x="{x:.1f}" y="{height + 14:.1f}" text-anchor="middle">{tick:g} s</text>')
    legend = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in LEGEND.items())
    more = f"<p>{len(ranks) - len(shown)} more ranks are in --json.</p>" if len(ranks) > len(shown) else ""
    return (
        f'<section><h2>Recorded ranks</h2><p class="legend">{legend}</p>'
        f'<svg viewBox="0 0 {WIDTH} {height + 20:.0f}">{"".join(drawn)}</svg>{more}</section>'
    )


def _bar(y: float, label: str, seconds: dict[str, Any], scale: float) -> Iterator[str]:
    yield f'<text x="0" y="{y + 12:.1f}">{html.escape(label)}</text>'
    x = float(LEFT)
    for name in PARTS:
        wide = max(0.0, seconds[name]) * scale
        text = html.escape(f"{LEGEND[name]}: {seconds[name]:.4f} s")
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="14" class="{name}"><title>{text}</title></rect>'
        x += wide
    whole = sum(seconds[name] for name in PARTS)
    yield f'<text x="{x + 6:.1f}" y="{y + 12:.1f}" class="figure">{whole:.4f} s</text>'


def _notes(report: ProfileReport) -> str:
    rows = "".join(f"<li>{html.escape(note)}</li>" for note in report.said())
    return f"<section><h2>What the figures rest on</h2><ul>{rows}</ul></section>"
