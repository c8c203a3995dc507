"""In which order texts go through the model: neighbours begin alike, and those of a batch are about as long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Tokens = tuple[int, ...]
SHARED_PART = 0.5  # of a text: with less in common it does not belong to the texts before it


def ordered(texts: Sequence[Tokens]) -> list[Tokens]:
    """Different ``texts``: groups that share their beginning one after the other, inside of each the longest first.

    Texts that share nothing are one group: the last of all, so that whoever waits sees the long ones first there, too.
    """
    groups = list(_groups(sorted(set(texts))))
    several = [group for group in groups if len(group) > 1]
    single = [text for group in groups if len(group) == 1 for text in group]
    several.sort(key=lambda group: -max(map(len, group)))
    return [text for group in [*several, single] for text in sorted(group, key=lambda text: (-len(text), text))]


def batches(texts: Sequence[Tokens], size: int) -> Iterator[Sequence[Tokens]]:
    """``size`` texts after the other; the last batch may be smaller."""
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _groups(texts: Sequence[Tokens]) -> Iterator[list[Tokens]]:
    """Sorted texts, cut where one has less than half of itself in common with all of the group before it."""
    group: list[Tokens] = []
    shared = 0
    for text in texts:
        with_text = _common(group[0][:shared], text) if group else 0
        if group and with_text < SHARED_PART * len(text):
            yield group
            group = []
        shared = with_text if group else len(text)
        group.append(text)
    if group:
        yield group


def _common(first: Tokens, second: Tokens) -> int:
    """Number of tokens with which both begin."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)
