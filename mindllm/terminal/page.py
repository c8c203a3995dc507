"""Pages made from templates: HTML with ``{{name}}`` where something goes. What goes in is never looked at for names again.

All pages have one frame: ``{{frame}}`` is its style sheet, and ``{{mark}}`` the line above the heading.
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
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # of axes, times a power of ten, as matplotlib and D3 have them


def fill(template: Path, texts: Mapping[str, str], markup: Mapping[str, str]) -> str:
    """The page of a template: ``texts``, which are escaped, and ``markup``, which is HTML, in one pass.

    Raises:
        KeyError: the template has a name that none of them gives.
    """
    parts = {"frame": frame(), **{name: html.escape(text) for name, text in texts.items()}, **markup}
    return NAME.sub(lambda found: parts[found[1]], template.read_text(encoding="utf-8"))


@cache
def frame() -> str:
    """Return the style sheet that all pages have."""
    return FRAME.read_text(encoding="utf-8")


def mark(kind: str, to_proof: bool = False, aside: str = "") -> str:
    """Return the line above a heading: what kind of page it is, and ``aside`` or the way back to the proof of the run."""
    back = f'<a href="{PROOF}">the proof of this run</a>' if to_proof else html.escape(aside)
    return f'<p class="mark"><span><b>mindllm</b> {html.escape(kind)}</span><span>{back}</span></p>'


def beside_proof(directory: Path) -> bool:
    """Return whether a page in this directory lies beside the page of a proof."""
    return (directory / PROOF).is_file() and (directory / RESULT).is_file()


def json_markup(tree: Any) -> str:
    """JSON that may stand inside ``<script type="application/json">``: no text in it can end the script, or begin a comment."""
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def round_ticks(most: float, count: int = 5) -> list[float]:
    """Return the multiples, from 0 to ``most``, of the smallest round step that gives no more than ``count`` of them above 0."""
    if not most > 0 or not math.isfinite(most):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(power * one for one in STEPS if power * one * count >= most * (1 - 1e-9))
    return [step * number for number in range(int(most / step * (1 + 1e-9)) + 1)]
