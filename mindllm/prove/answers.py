"""What a question of a proof is answered with: a standing, a line, and the evidence, all of it plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from pydantic import TypeAdapter

from mindllm.config import RunConfig
from mindllm.errors import Problem, UserError


class Standing(str, Enum):
    """How a question stands."""

    PROVED = "proved"
    REFUTED = "refuted"
    NOT_PROVED = "not proved"
    EXPECTED = "expected"  # a formula says so; the proof is still to come


@dataclass(frozen=True)
class Finding:
    """Why a question is refuted or not proved, with its place in the YAML.

    Attributes:
        message: what is wrong.
        advice: what would change it; empty where nothing is known.
        key: dotted key of the YAML it is about; empty where it is about none.
        file: the file of that key; line: its line, from 1 on.
    """

    message: str
    advice: str = ""
    key: str = ""
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        said = ": ".join(filter(None, [place, self.key, self.message]))
        return f"{said}; {self.advice}" if self.advice else said


@dataclass(frozen=True)
class Table:
    """A table of evidence: texts and numbers as they are shown, one row each."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """A page of its own that shows more than an answer can.

    Attributes:
        title: what it shows, for a link.
        file: its name beside the report.
        text: its HTML; empty in ``proof.json``, which names pages alone.
    """

    title: str
    file: str
    text: str = ""


@dataclass(frozen=True)
class Answer:
    """How a question stands, and why.

    Attributes:
        question: its name.
        says: the answer in a line.
        findings: why it is not proved; empty where it is.
        evidence: lines to unfold.
        tables: tables to unfold.
        figures: numbers for programs, by name; bytes, seconds and shares.
        seconds: what it took to find out.
        proved_on: the day of an earlier proof that still holds, as ``2026-11-20``; empty where it was found now.
        pages: that are written beside the report.
    """

    question: str
    standing: Standing
    says: str
    findings: tuple[Finding, ...] = ()
    evidence: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    proved_on: str = ""
    pages: tuple[Page, ...] = ()

    def tree(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "standing": self.standing.value, "figures": dict(self.figures)}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Answer:
        """Return the inverse of :meth:`tree`, also from JSON; raise ValueError for any other value."""
        return TypeAdapter(cls).validate_python(tree)


WORST_FIRST = (Standing.REFUTED, Standing.NOT_PROVED, Standing.EXPECTED, Standing.PROVED)


def merged(parts: Sequence[Answer]) -> Answer:
    """Return one answer to a question that several pieces of work answer, each a part of it: it stands as the worst of them."""
    first, *others = parts
    if not others:
        return first
    worst = min((part.standing for part in parts), key=WORST_FIRST.index)
    days = [part.proved_on for part in parts]
    return Answer(
        first.question,
        worst,
        "; ".join(dict.fromkeys(part.says for part in parts if part.standing is worst)),
        tuple(finding for part in parts for finding in part.findings),
        tuple(line for part in parts for line in part.evidence),
        tuple(table for part in parts for table in part.tables),
        {name: value for part in parts for name, value in part.figures.items()},
        max(part.seconds for part in parts),
        min(days) if all(days) else "",
        tuple(page for part in parts for page in part.pages),
    )


def located(config: RunConfig, finding: Finding) -> Finding:
    """Return a finding with the file and the line that say its key, or what holds it; one without a key as it is."""
    if not finding.key or finding.file:
        return finding
    problem = config.error(finding.key, "").first
    return replace(finding, file=problem.file or problem.option, line=problem.line)


def of_problem(problem: Problem) -> Finding:
    """Return the finding of a mistake that loading has found."""
    return Finding(problem.reason, problem.advice, problem.key, problem.file or problem.option, problem.line)


def of_error(error: UserError) -> tuple[Finding, ...]:
    """Return the findings of an error, one for each of its mistakes."""
    return tuple(map(of_problem, error.problems)) or (Finding(str(error)),)
