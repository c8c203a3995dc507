"""What tests ask of a page in Markdown: its blocks, its commands, the files that it links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language (empty for what a command printed), its text, and how many headings stand before it."""

    language: str
    text: str
    headings: int = 0

    def lines(self) -> list[str]:
        """Return the lines without those that only go on with the one before."""
        return self.text.replace("\\\n", " ").splitlines()

    def commands(self) -> list[list[str]]:
        """Return the words of each command, without comments and a ``> file`` at its end.

        Of a block of bash these are all lines, otherwise those behind ``$``.
        """
        lines = self.lines()
        if self.language != "bash":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [found for line in lines if (found := words(line))]


def words(line: str) -> list[str]:
    """Return the words of a command, without a comment and a ``> file`` at its end."""
    found = shlex.split(line, comments=True)
    return found[:-2] if found[-2:-1] == [">"] else found


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in their order."""
    whole = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], len(HEADING.findall(FENCE.sub("", whole[: found.start()]))))
        for found in FENCE.finditer(whole)
    ]


def commands(page: Path) -> list[list[str]]:
    """Return the commands of all blocks."""
    return [found for block in blocks(page) for found in block.commands()]


def dead_links(page: Path) -> Iterator[str]:
    """Yield links of a page to files, or to headings of pages, that are not there."""
    for found in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        link = found[1] or found[2]
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in anchors(target)):
            yield link


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    texts = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}
