"""HTML pages from templates with ``{{name}}`` placeholders; substituted text is not scanned again.

All pages share ``{{frame}}``, the style sheet, and ``{{mark}}``, the line above the heading.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

NAME = re.compile(r"\{\{(\w+)\}\}")
FRAME = Path(__file__).with_name("page.css")
PROOF, RESULT = "report.html", "proof.json"
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # steps of axes times a power of ten, as in matplotlib and D3


def fill(template: Path, texts: Mapping[str, str], markup: Mapping[str, str]) -> str:
    """Return the page of a template with escaped ``texts`` and HTML ``markup``.

    Raises:
        KeyError: a placeholder has no value.
    """
    parts = {"frame": frame(), **{name: html.escape(text) for name, text in texts.items()}, **markup}
    return NAME.sub(lambda found: parts[found[1]], template.read_text(encoding="utf-8"))


@cache
def frame() -> str:
    """Return the style sheet of all pages."""
    return FRAME.read_text(encoding="utf-8")


def mark(kind: str, to_proof: bool = False, aside: str = "") -> str:
    """Return the line above a heading: the kind of page, and ``aside`` or a link to the proof of the run."""
    back = f'<a href="{PROOF}">the proof of this run</a>' if to_proof else html.escape(aside)
    return f'<p class="mark"><span><b>mindllm</b> {html.escape(kind)}</span><span>{back}</span></p>'


def beside_proof(directory: Path) -> bool:
    """Return True if the directory contains the page of a proof."""
    return (directory / PROOF).is_file() and (directory / RESULT).is_file()


def json_markup(tree: Any) -> str:
    """Return JSON for ``<script type="application/json">``, in which no text can end the script or start a comment."""
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def round_ticks(most: float, count: int = 5) -> list[float]:
    """Return axis ticks from 0 to ``most``: multiples of the smallest round step with at most ``count`` ticks above 0."""
    if not most > 0 or not math.isfinite(most):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(power * size for size in STEPS if power * size * count >= most * (1 - 1e-9))
    return [step * number for number in range(int(most / step * (1 + 1e-9)) + 1)]
