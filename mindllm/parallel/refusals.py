"""Says in the user's terms what MindSpore's compiler refused: which operator of the model, its strategy, its line, the reason.

The compiler names the kind of the operator and the lines through which it was reached, but not the operator. Its attribute
names stand in those lines (``self.feed_forward``, ``self.w1``, ``self.matmul``), so they lead to its path in the model.
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
    """MindSpore's compiler refused the configuration; holds what it said."""


@dataclass(frozen=True)
class Frame:
    """A call on the way to an operator: where, and the expression that was called."""

    file: str
    line: int
    called: str

    def __str__(self) -> str:
        path = Path(self.file)
        own = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else Path(*path.parts[-3:])
        return f"{own}:{self.line}"

    @property
    def attribute(self) -> str:
        """The attribute that was called: ``w1`` of ``self.w1(x)``."""
        found = ATTRIBUTE.match(self.called)
        return found.group(1) if found else ""


@contextmanager
def refusals_explained(step: nn.Cell) -> Iterator[None]:
    """Turns the compiler's refusal of an operator of ``step`` into a :class:`CompileFailed` that names it."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        refused = REFUSED.search(str(error))
        if not refused:
            raise
        raise CompileFailed(_explanation(refused["operator"], frames(str(error)), step)) from None


def frames(message: str) -> list[Frame]:
    """The calls a message lists, the innermost first; whole definitions and MindSpore's own lines left out."""
    found = []
    for match in FRAME.finditer(message):
        called = match["text"][int(match["first"]) : int(match["last"])]
        if "/mindspore/" not in match["file"]:
            found.append(Frame(match["file"], int(match["line"]), called))
    return found


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
    """Path and primitive of the operator of ``kind`` that the attributes lead to; of equal layers that of the first.

    ``attributes`` are those called on the way, the outermost first.
    """
    from mindllm.models import CausalLM
    from mindllm.parallel.operators import operators

    model = next((cell for _, cell in step.cells_and_names() if isinstance(cell, CausalLM)), step)
    best, found = 0, ("", None)
    for path, operator in operators(model).items():
        names = [name for name in path.split(".") if not name.isdigit()]
        if operator.name == kind and len(names) > best and _leads_to(attributes, names):
            best, found = len(names), (path, operator)
    return found


def _leads_to(attributes: Sequence[str], names: Sequence[str]) -> bool:
    """Whether ``names`` occur in ``attributes`` in their order, the last one last."""
    rest = iter(attributes)
    return bool(attributes) and attributes[-1] == names[-1] and all(name in rest for name in names)


def _strategy(operator: Any) -> str:
    attributes = operator.get_attr_dict()
    inputs, output = attributes.get("in_strategy"), attributes.get("out_strategy")
    return f"inputs {inputs}" + (f", output {output}" if output else "")


def reason(log: str) -> str:
    """The first reason the compiler logged; empty if it logged none."""
    found = REASON.search(log)
    return found["text"].strip() if found else ""
