"""Text that is shown: styles without markup, and nothing that a terminal would obey."""

from __future__ import annotations

import re

from rich.text import Text

HIDDEN = re.compile(  # C0 but tab and newline, DEL, C1; separators and overrides of direction, which reorder a line; surrogates
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""``text`` with what a terminal would obey, or cannot encode, written as an escape such as ``\x1b`` or ``\ud800``."""
    return HIDDEN.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def styled(*parts: str | Text | tuple[str, str]) -> Text:
    """Joins strings, strings with a style such as ``("fits", "green")``, and texts; nothing in them is markup."""
    whole = Text()
    for part in parts:
        if isinstance(part, Text):
            whole.append_text(part)
        else:
            text, style = (part, "") if isinstance(part, str) else part
            whole.append(visible(text), style)
    return whole
