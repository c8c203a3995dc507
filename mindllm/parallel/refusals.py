"""Errors of MindSpore's compiler in the user's terms: the operator of the model, its strategy, its line and the reason.

The compiler names the kind of the operator and the lines through which it was reached, but not the operator. Its attribute
names are in those lines (``self.feed_forward``, ``self.w1``, ``self.matmul``), so they lead to its path in the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.errors import UserError
from mindllm.sources import PACKAGE

if TYPE_CHECKING:
    from mindspore import nn

REFUSED = re.compile(r"[Oo]perator (?P<operator>\w+) init failed")
FRAME = re.compile(
    r"^In file (?P<file>.+?):(?P<line>\d+), (?P<first>\d+)~(?P<last>\d+)/(?P<text>.*)/\.?$", re.MULTILINE
)
ATTRIBUTE = re.compile(r"self\.(\w+)")
REASON = re.compile(r"^\[ERROR\] PARALLEL\(.*?\):\S+ \[[^\]]*\] \w+\] (?:\w+ ?: )?(?P<text>.*)$", re.MULTILINE)
CALLERS = 3


class CompileFailed(UserError):
    """An error of MindSpore's compiler about the configuration."""


@dataclass(frozen=True)
class Frame:
    """A call on the way to an operator: its place and expression."""

    file: str
    line: int
    called: str

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else Path(*path.parts[-3:])
        return f"{shown}:{self.line}"

    @property
    def attribute(self) -> str:
        """The called attribute: ``w1`` of ``self.w1(x)``."""
        match = ATTRIBUTE.match(self.called)
        return match.group(1) if match else ""


@contextmanager
def refusals_explained(step: nn.Cell) -> Iterator[None]:
    """Turn the compiler's error about an operator of ``step`` into a :class:`CompileFailed` that names it."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        refused = REFUSED.search(str(error))
        if not refused:
            raise
        raise CompileFailed(_explanation(refused["operator"], frames(str(error)), step)) from None


def frames(message: str) -> list[Frame]:
    """Return the calls that a message lists, innermost first, without definitions and MindSpore's own lines."""
    calls = []
    for match in FRAME.finditer(message):
        called = match["text"][int(match["first"]) : int(match["last"])]
        if "/mindspore/" not in match["file"]:
            calls.append(Frame(match["file"], int(match["line"]), called))
    return calls


def _explanation(kind: str, calls: Sequence[Frame], step: nn.Cell) -> str:
    path, operator = find_operator(kind, [call.attribute for call in reversed(calls)], step)
    lines = [f"MindSpore's compiler refuses the sharding of {path or 'an operator'} ({kind})"]
    if operator is not None:
        lines.append(f"  strategy: {_strategy(operator)}")
    if calls:
        lines.append(f"  source: {', called from '.join(map(str, calls[:CALLERS]))}")
    lines.append(
        "  to change: sizes in parallel_config (data_parallel, model_parallel) that divide its dimensions, or its layouts in "
        "mindllm/parallel/sharding/cells.py"
    )
    return "\n".join(lines)


def find_operator(kind: str, attributes: Sequence[str], step: nn.Cell) -> tuple[str, Any]:
    """Return path and primitive of the operator of ``kind`` that the attributes lead to, the first of equal layers.

    ``attributes``: the attributes called on the way, outermost first.
    """
    from mindllm.models import CausalLM
    from mindllm.parallel.operators import operators

    model = next((cell for _, cell in step.cells_and_names() if isinstance(cell, CausalLM)), step)
    best, candidate = 0, ("", None)
    for path, operator in operators(model).items():
        names = [name for name in path.split(".") if not name.isdigit()]
        if operator.name == kind and len(names) > best and _leads_to(attributes, names):
            best, candidate = len(names), (path, operator)
    return candidate


def _leads_to(attributes: Sequence[str], names: Sequence[str]) -> bool:
    """Return True if ``names`` occur in ``attributes`` in order, the last one last."""
    rest = iter(attributes)
    return bool(attributes) and attributes[-1] == names[-1] and all(name in rest for name in names)


def _strategy(operator: Any) -> str:
    attributes = operator.get_attr_dict()
    inputs, output = attributes.get("in_strategy"), attributes.get("out_strategy")
    return f"inputs {inputs}" + (f", output {output}" if output else "")


def reason(log: str) -> str:
    """Return the first reason that the compiler logged, or an empty string."""
    match = REASON.search(log)
    return match["text"].strip() if match else ""
