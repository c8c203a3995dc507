"""The page of an acceptance: claim, predicted, measured, verdict; what was not run, and why; what the figures rest on."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from mindllm.accept.acceptance import Acceptance, cells
from mindllm.accept.claims import BY_NAME
from mindllm.accept.judge import LINK_TOLERANCE, PEAK_TOLERANCE, Line
from mindllm.terminal.page import fill, mark

TEMPLATE = Path(__file__).with_name("page.html")
TITLE = "What mindllm claims, and what small runs have shown"
NOTES = (
    f"Peak: the first rank; it may lie {PEAK_TOLERANCE:.0%} below the dry run, or {PEAK_TOLERANCE:.0%} above it with an estimate "
    "of kernels' workspace. Both are assumed.",
    "Step: the median of steps that neither compile nor are profiled. Most of the small step is no kernel.",
    "Kernels: seconds in which the slowest recorded rank of a stage computes.",
    f"Bandwidth: bytes over seconds of an exchange without waiting; {LINK_TOLERANCE:.0%} off what the described links give is "
    "allowed, which is assumed.",
    "Losses on a device may differ from those of the CPU by more than on a CPU: bfloat16. That tolerance is assumed, too.",
    "Code for devices is written from documentation. No Ascend device had run it when it was written.",
    "This page has no names of hosts or users, no paths, no addresses and no variables of the environment.",
)


def render_page(found: Acceptance) -> str:
    """Return HTML that needs nothing else."""
    head = "".join(f"<th>{name}</th>" for name in ("claim", "figure"))
    head += "".join(f'<th class="figure">{name}</th>' for name in ("predicted", "measured"))
    head += "<th>verdict</th><th>why</th>"
    bodies = "".join(f"<tbody>{''.join(_rows(found, claim))}</tbody>" for claim in found.claims)
    body = f"<section><table><thead><tr>{head}</tr></thead>{bodies}</table></section>{_rest(found)}"
    texts = {"title": TITLE, "headline": found.headline(), "where": found.where()}
    return fill(TEMPLATE, texts, {"mark": mark("acceptance"), "body": body})


def _rows(found: Acceptance, claim: str) -> Iterator[str]:
    lines = found.of(claim)
    for number, line in enumerate(lines):
        yield f"<tr>{_claim(found, claim, len(lines)) if number == 0 else ''}{_cells(line)}</tr>"


def _claim(found: Acceptance, claim: str, rows: int) -> str:
    took = f", {found.took[claim]:.0f} s" if claim in found.took else ""
    stands = f"{_verdict(found.verdict(claim).value)}{took}"
    return f'<td class="claim" rowspan="{rows}"><b>{escape(claim)}</b>{escape(BY_NAME[claim].says)}<br>{stands}</td>'


def _cells(line: Line) -> str:
    _, figure, predicted, measured = cells(line)
    figures = "".join(f'<td class="figure">{escape(text)}</td>' for text in (predicted, measured))
    return f"<td>{escape(figure)}</td>{figures}<td>{_verdict(line.verdict.value)}</td><td>{escape(line.why)}</td>"


def _verdict(words: str) -> str:
    return f'<span class="verdict {words.replace(" ", "-")}">{escape(words)}</span>'


def _rest(found: Acceptance) -> str:
    versions = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value or 'not found')}</td></tr>"
        for name, value in found.versions.items()
    )
    states = "".join(
        f"<tr><td>{escape(subject)}</td><td>{escape(state)}</td></tr>" for subject, state in found.preflight
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in NOTES)
    return (
        f"<section><h2>Versions</h2><table>{versions}</table></section><section><h2>Preflight</h2><table>{states}</table></section>"
        f"<section><h2>What the figures rest on</h2><ul>{notes}</ul></section>"
    )  # fmt: skip
