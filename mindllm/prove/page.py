"""The page of a proof: the verdict, the run, pictures of its memory and time, the ten questions, and what no proof covers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from mindllm.prove import pictures
from mindllm.prove.answers import Answer, Finding, Page, Standing, Table
from mindllm.prove.proof import Proof
from mindllm.prove.questions import MEMORY, QUESTIONS, STEP_TIME
from mindllm.prove.words import date_words, glances, uncovered, why
from mindllm.terminal.page import fill, mark

TEMPLATE = Path(__file__).with_name("report.html")
NUMBER = re.compile(r"[-+−]?[\d.,]+( ?[%a-zA-Z]{0,3})?")
ON_PAPER = 18  # findings, and rows of tables, that go onto paper, shared among the questions that have some
SIGNS = {Standing.PROVED: "✓", Standing.REFUTED: "✕", Standing.NOT_PROVED: "?", Standing.EXPECTED: "≈"}


def render_page(proof: Proof) -> str:
    """Return the page as HTML."""
    verdict = proof.verdict.value
    texts = {"title": proof.run.name, "verdict": verdict, "kind": _class(verdict), "why": why(proof)}
    markup = {
        "name": escape(proof.run.name).replace("/", "/<wbr>").replace("_", "_<wbr>"),
        "mark": mark("proof", aside=date_words(proof.run.date)),
        "count": _count(proof),
        "glances": "".join(_glances(proof)),
        "run": "".join(_run(proof)),
        "pictures": "".join(_pictures(proof)),
        "questions": "".join(_question(proof, answer) for answer in proof.answers),
        "closing": _closing(proof) if proof.run.hash else "",
    }
    return fill(TEMPLATE, texts, markup)


def _class(words: str) -> str:
    return words.replace(" ", "-")


def _count(proof: Proof) -> str:
    """A square for each question in its order, and how many stand how."""
    squares = "".join(
        f'<a class="{_class(answer.standing.value)}" href="#{answer.question}" title="{escape(QUESTIONS[answer.question].text)} '
        f'{answer.standing.value}">{SIGNS[answer.standing]}</a>'
        for answer in proof.answers
    )
    standings = [answer.standing for answer in proof.answers]
    words = ", ".join(f"{standings.count(one)} {one.value}" for one in Standing if one in standings)
    return f'<span class="squares">{squares}</span> <span>{words}</span>'


def _glances(proof: Proof) -> Iterator[str]:
    for one in glances(proof):
        wrong = ' class="wrong"' * one.wrong
        yield f"<div{wrong}><dt>{escape(one.name)}</dt><dd><b>{escape(one.value)}</b>{escape(one.about)}</dd></div>"


def _run(proof: Proof) -> Iterator[str]:
    run = proof.run
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    facts = {**run.words, "timed on": proof.device, "seed": str(run.seed) if run.hash else "", "versions": versions}
    for name, value in facts.items():
        if value:
            yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    took = f"{proof.seconds:,.0f} s" if proof.seconds >= 1 else ""
    if took:
        yield f"<div><dt>proved in</dt><dd>{took}</dd></div>"
    if run.hash:
        yield f'<div class="wide"><dt>hash</dt><dd><code>{escape(run.hash)}</code></dd></div>'


def _pictures(proof: Proof) -> Iterator[str]:
    memory, step = proof.answer(MEMORY), proof.answer(STEP_TIME)
    yield _picture("Memory of each stage", memory, pictures.memory_bars(memory.figures))
    yield _picture("Time of a step by cause", step, pictures.time_bars(step.figures))
    yield _picture("Pipeline schedule", step, pictures.schedule(step.figures), pictures.schedule_words(step.figures))


def _picture(title: str, answer: Answer, drawn: str, about: str = "") -> str:
    if not drawn:
        return ""
    formula = "expected by formula" if answer.standing is Standing.EXPECTED else ""
    small = " · ".join(filter(None, [about, formula]))
    links = _links([page for page in answer.pages if ("schedule" in page.title) == bool(about)])
    wide = ' class="wide"' * bool(about)
    return f"<section{wide}><h2>{title} <small>{escape(small)}</small>{links}</h2>{drawn}</section>"


def _closing(proof: Proof) -> str:
    """What is open, and the line to sign; nothing of a run that does not load."""
    rows = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in uncovered(proof))
    sign = '<div class="sign"><span>name</span><span>date</span><span>signature</span></div>'
    return f'<div class="closing"><h2>What no proof covers</h2><ul class="uncovered">{rows}</ul>{sign}</div>'


def _question(proof: Proof, answer: Answer) -> str:
    """A question with its standing, why it stands so, and its evidence to unfold."""
    most = max(2, ON_PAPER // max(1, sum(bool(one.findings) for one in proof.answers)))
    question, standing = QUESTIONS[answer.question], answer.standing.value
    is_open = answer.standing is Standing.REFUTED or answer in proof.open
    allowed = " <small>allowed to stay open</small>" if not is_open and answer.standing is not Standing.PROVED else ""
    since = f" <small>since {escape(answer.proved_on)}</small>" if answer.proved_on else ""
    return (
        f'<article id="{answer.question}" class="{_class(standing)}"><p class="chip">{SIGNS[answer.standing]} {standing}</p>'
        f"<div><h3>{escape(question.text)}</h3><p>{escape(answer.says)}{since}{allowed}</p>{_findings(answer.findings, most)}"
        f"{_evidence(proof, answer, is_open, most)}</div></article>"
    )


def _findings(findings: Sequence[Finding], most: int) -> str:
    if not findings:
        return ""
    rows = "".join(_finding(one, number >= most) for number, one in enumerate(findings))
    more = len(findings) - most
    rest = f'<li class="on-paper">and {more} more, on the screen</li>' if more > 0 else ""
    return f'<ul class="findings">{rows}{rest}</ul>'


def _finding(finding: Finding, beyond: bool) -> str:
    place = f"{finding.file}:{finding.line}" if finding.line else finding.file
    parts = [f"<code>{escape(part)}</code>" for part in (place, finding.key) if part]
    where = f'<span class="where">{" ".join(parts)}</span> ' if parts else ""
    advice = f'<span class="advice">{escape(finding.advice)}</span>' if finding.advice else ""
    return f"<li{' class=beyond' * beyond}>{where}{escape(finding.message)}{advice}</li>"


def _evidence(proof: Proof, answer: Answer, is_open: bool, most: int) -> str:
    """What unfolds: lines, tables, pages, what found it out, and the command that looks closer; empty where nobody has looked."""
    question = QUESTIONS[answer.question]
    lines = "".join(f"<li>{escape(line)}</li>" for line in answer.evidence)
    parts = [f"<ul>{lines}</ul>" if lines else "", *(_table(table, most) for table in answer.tables)]
    if not any(parts) and (not answer.seconds or not question.verb):
        return ""
    took = f", {answer.seconds:,.1f} s" if answer.seconds >= 0.05 else ""
    command = f"mindllm {question.verb} {shlex.quote(proof.run.name)}"
    closer = f"; closer: <code>{escape(command)}</code>" if question.verb else ""
    parts.append(f'<p class="by">by {escape(question.by)}{took}{closer}{_links(answer.pages)}</p>')
    opened = " open" * (is_open and any(parts[:-1]))
    return f"<details{opened}><summary>evidence</summary>{''.join(parts)}</details>"


def _links(pages: Sequence[Page]) -> str:
    return "".join(f' <a class="page" href="{escape(page.file)}">{escape(page.title)}</a>' for page in pages)


def _table(table: Table, most: int) -> str:
    columns = list(zip(*table.rows, strict=True)) if table.rows else [() for _ in table.columns]
    sides = [' class="figure"' * all(map(NUMBER.fullmatch, column)) for column in columns]
    rows = "".join(
        f"<tr{' class=beyond' * (number >= most)}>{_cells('td', row, sides)}</tr>"
        for number, row in enumerate(table.rows)
    )
    head = f"<tr>{_cells('th', table.columns, sides)}</tr>"
    more = len(table.rows) - most
    rest = f'<p class="on-paper">and {more} more rows, on the screen</p>' if more > 0 else ""
    caption = f"<caption>{escape(table.title)}</caption>"
    return f'<div class="table"><table>{caption}<thead>{head}</thead><tbody>{rows}</tbody></table></div>{rest}'


def _cells(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    return "".join(f"<{tag}{side}>{escape(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True))
