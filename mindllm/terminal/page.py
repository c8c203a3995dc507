"""Pages made from templates: HTML with ``{{name}}`` where something goes. What goes in is never looked at for names again."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = re.compile(r"\{\{(\w+)\}\}")


def fill(template: Path, texts: Mapping[str, str], markup: Mapping[str, str]) -> str:
    """The page of a template: ``texts``, which are escaped, and ``markup``, which is HTML, in one pass.

    Raises:
        KeyError: the template has a name that none of them gives.
    """
    parts = {**{name: html.escape(text) for name, text in texts.items()}, **markup}
    return NAME.sub(lambda found: parts[found[1]], template.read_text(encoding="utf-8"))


def json_markup(tree: Any) -> str:
    """JSON that may stand inside ``<script type="application/json">``: no text in it can end the script, or begin a comment."""
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
