"""Source lines of operators, read from MindSpore's text IR: MindIR leaves them out.

The text of a graph says, under the operator's full name, through which calls its line was reached::

    # Fullname with scope: (Default/…/wq-Linear/MatMul-op0)
    # In file /…/models/decoder.py:52, 34~95/        x = self.attention_add(x, …)/
    # In file /…/models/linear.py:71, 12~67/        y = self.matmul(self.operand(x), …)/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FULL_NAME = re.compile(r"^ +# Fullname with scope: \((?P<scope>.*)\)$")
LINE = re.compile(r"^ +# In file (?P<file>.*?):(?P<first>\d+)(?P<more>~\d+)?, \d+~\d+/(?P<text>.*)/\.?$")
LIBRARY = "/mindspore/"


@dataclass(frozen=True)
class SourceLine:
    """A line of a program: ``decoder.py:52``."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


Sources = Mapping[str, tuple[SourceLine, ...]]


def read_sources(lines: Iterable[str]) -> dict[str, tuple[SourceLine, ...]]:
    """For each operator's full name the calls that led to it, the innermost last.

    Left out are lines of MindSpore's own, and those of whole definitions, which say no more than the call above them.
    """
    found: dict[str, tuple[SourceLine, ...]] = {}
    known: dict[str, SourceLine] = {}
    scope, stack = "", []
    for text in lines:
        if line := LINE.match(text):
            if not line["more"] and LIBRARY not in line["file"]:
                stack.append(known.setdefault(text, SourceLine(line["file"], int(line["first"]), line["text"].strip())))
            continue
        if stack:
            found.setdefault(scope, _without_repeats(stack))
        name = FULL_NAME.match(text)
        scope, stack = name["scope"] if name else "", []
    if stack:
        found.setdefault(scope, _without_repeats(stack))
    return found


def _without_repeats(stack: list[SourceLine]) -> tuple[SourceLine, ...]:
    """Remove repeated lines, which stand for each expression around an operator."""
    return tuple(line for index, line in enumerate(stack) if index == 0 or line != stack[index - 1])


def sources_to_json(sources: Sources) -> dict:
    """Convert sources to tables: each line once, and for every operator the numbers of its lines."""
    numbers: dict[SourceLine, int] = {}
    calls = {
        scope: [numbers.setdefault(line, len(numbers)) for line in stack] for scope, stack in sources.items() if scope
    }
    return {"lines": [[line.file, line.line, line.text] for line in numbers], "calls": calls}


def sources_from_json(tree: Mapping) -> Sources:
    """Read the tables of :func:`sources_to_json`."""
    lines = [SourceLine(str(file), int(line), str(text)) for file, line, text in tree["lines"]]
    return {scope: tuple(lines[number] for number in numbers) for scope, numbers in tree["calls"].items()}
