"""What an acceptance leaves: one page, and one archive of the page, the figures and the steps of every run.

Only what is made here goes into the archive, never a file of a run: numbers of known keys, sentences of ours, versions. So no
name of a host or user, no path, address or variable of the environment can come into it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

from mindllm.accept.acceptance import Acceptance, cells
from mindllm.accept.claims import BY_NAME
from mindllm.accept.judge import LINK_TOLERANCE, PEAK_TOLERANCE, Line
from mindllm.files import atomic_open, atomic_path
from mindllm.terminal.json_text import strict
from mindllm.terminal.page import fill, mark

PAGE, FIGURES, ARCHIVE = "acceptance.html", "acceptance.json", "acceptance.zip"
DATE = (2020, 1, 1, 0, 0, 0)  # of every member: when a machine was used is nobody's business
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


def write_acceptance(found: Acceptance, directory: Path) -> tuple[Path, Path]:
    """Write page and archive into a directory; return both."""
    page = render_page(found)
    with atomic_open(directory / PAGE) as file:
        file.write(page)
    with atomic_path(directory / ARCHIVE) as path, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members(found, page).items():
            archive.writestr(zipfile.ZipInfo(name, DATE), text)
    return directory / PAGE, directory / ARCHIVE


def members(found: Acceptance, page: str) -> dict[str, str]:
    """Return the files of the archive by name."""
    runs = {
        f"runs/{name}.jsonl": "".join(f"{json.dumps(strict(dict(record)), allow_nan=False)}\n" for record in records)
        for name, records in found.records.items()
    }
    return {PAGE: page, FIGURES: json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n", **runs}


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
    states = _heading(found.nodes) + "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in (subject, *each))}</tr>"
        for subject, each in found.states()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in NOTES)
    return (
        f"<section><h2>Versions</h2><table>{versions}</table></section><section><h2>Preflight</h2><table>{states}</table></section>"
        f"<section><h2>What the figures rest on</h2><ul>{notes}</ul></section>"
    )  # fmt: skip


def _heading(nodes: int) -> str:
    """Return the heads of the columns of preflight: one node needs none."""
    names = ("", *(f"node {number}" for number in range(nodes)))
    return f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>" if nodes > 1 else ""
