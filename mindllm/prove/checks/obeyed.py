"""Whether graphs are what the YAML asks for, as an answer: those of the small model, or those at the widths of the run."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.compiled.conformance.finding import Finding as Asked
from mindllm.prove.answers import Answer, Finding, Standing, Table
from mindllm.prove.questions import CONFORMANCE


def obeyed(asked: Sequence[Asked], title: str, says: str) -> Answer:
    """Return the answer that graphs give to what was ``asked``; ``says``: the line where all of it is obeyed."""
    rows = tuple((item.what, item.asked, item.found, "" if item.holds else "not obeyed") for item in asked)
    table = Table(title, ("", "asked for", "in the compiled graphs", " "), rows)
    findings = tuple(Finding(f"{item.what}: {problem}") for item in asked for problem in item.problems)
    if findings:
        says = f"not as the YAML asks: {', '.join(item.what for item in asked if not item.holds)}"
        return Answer(CONFORMANCE, Standing.REFUTED, says, findings, tables=(table,))
    return Answer(CONFORMANCE, Standing.PROVED, says, tables=(table,))
