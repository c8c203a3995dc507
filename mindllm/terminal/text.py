"""Text for terminals: styles without markup, and escaped control characters."""

from __future__ import annotations

import re

from rich.text import Text

HIDDEN = re.compile(  # C0 but tab and newline, DEL, C1; separators and overrides of direction, which reorder a line; surrogates
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Return text with control characters and surrogates escaped, such as ``\x1b`` or ``\ud800``."""
    return HIDDEN.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def styled(*parts: str | Text | tuple[str, str]) -> Text:
    """Join strings, strings with a style such as ``("fits", "green")``, and texts; none is markup."""
    joined = Text()
    for part in parts:
        if isinstance(part, Text):
            joined.append_text(part)
        else:
            text, style = (part, "") if isinstance(part, str) else part
            joined.append(visible(text), style)
    return joined
