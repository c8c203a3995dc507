"""What the licence of a model directory says, in a line where it forbids something: told, never decided for the person."""

from __future__ import annotations

import re
from pathlib import Path

from mindllm.errors import UserError
from mindllm.outside import read_text

FREE = {
    "apache-2.0",
    "mit",
    "bsd",
    "bsd-2-clause",
    "bsd-3-clause",
    "cc-by-4.0",
    "cc0-1.0",
    "unlicense",
    "isc",
    "bigcode-openrail-m",
}
CARD, CARD_KEYS = "README.md", ("license", "license_name")
FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
LARGEST = 1 << 20  # bytes of a card or a licence
FORBIDS = (
    (re.compile(r"non-?commercial|cc[- ]by[- ]nc|\bnc\b", re.I), "forbids commercial use"),
    (re.compile(r"research (?:purposes|use) only|research-only|for research", re.I), "allows research only"),
)


def licence_line(directory: Path) -> str:
    """Return a line about a licence that is not known to be free, or an empty one; a model without one is told, too, not."""
    if not directory.is_dir():
        return ""
    name = _card_licence(directory / CARD)
    text = next((_text(directory / file) for file in FILES if (directory / file).is_file()), "")
    forbids = next((what for pattern, what in FORBIDS if pattern.search(name) or pattern.search(text)), "")
    if forbids:
        return f"licence of {directory.name}{f' ({name})' if name else ''}: {forbids}; read it before you go on"
    if name and name.lower() not in FREE:
        return f"licence of {directory.name}: {name}, which has conditions of its own; read it before you go on"
    return ""


def _card_licence(card: Path) -> str:
    """The licence in the front matter of a model card."""
    text = _text(card)
    if not text.startswith("---"):
        return ""
    front = text.split("\n---", 1)[0]
    found = dict(re.findall(r"^(\w+):[ \t]*[\"']?([^\"'\n]+?)[\"']?[ \t]*$", front, re.M))
    named = [found[key] for key in reversed(CARD_KEYS) if found.get(key) and found[key] != "other"]
    return (named[0] if named else found.get("license", ""))[:60]


def _text(path: Path) -> str:
    try:
        return read_text(path, LARGEST)
    except (OSError, UserError):
        return ""
