"""What to write where a file is no YAML: PyYAML says where it noticed, which is often a line below the mistake."""

from __future__ import annotations

import re
from collections.abc import Sequence

FULL_WIDTH_COLON = re.compile(r"\s*(- +)*[\w.\-]+\s*\uff1a")
NO_SPACE = re.compile(r"""\s*(- +)*(?P<key>[A-Za-z_][\w.\-]*):(?P<value>[\w'"\[{.\-][^:]*)$""")
TAB = r"character '\t'"
ADVICE = {
    TAB: "indent with spaces, not with tabs",
    "found undefined alias": "an anchor &name stands before its alias *name, in the same file",
    "expected <block end>": "keys of one section begin in the same column",
    "could not find expected ':'": "write key: value, with a space behind the colon",
}


def syntax_advice(lines: Sequence[str], noticed: int, reason: str) -> str:
    """Return ``"; …"``: what to write, by the line (from 0 on) that the parser stopped at and the one before; else empty."""
    for number in () if TAB in reason else (noticed, *_written_before(lines, noticed)):
        if number < len(lines) and (advice := line_advice(lines[number].partition(" #")[0].rstrip())):
            return f"; line {number + 1}: {advice}"
    return next((f"; {advice}" for part, advice in ADVICE.items() if part in reason), "")


def _written_before(lines: Sequence[str], noticed: int) -> list[int]:
    """Return the nearest line before that is neither empty nor a comment."""
    for number in range(min(noticed, len(lines)) - 1, -1, -1):
        if lines[number].strip() and not lines[number].lstrip().startswith("#"):
            return [number]
    return []


def line_advice(line: str) -> str:
    """Return what to write in a line whose key has no colon that YAML knows; empty where it has one."""
    if FULL_WIDTH_COLON.match(line):
        return "the colon is a full-width one; write ': '"
    if missing := NO_SPACE.match(line):
        return f"no space behind the colon; write {missing['key']}: {missing['value']}"
    return ""
