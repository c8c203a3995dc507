"""One thing the YAML asks for, and whether the compiled graphs have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """``asked`` and ``found`` in words; ``problems`` is empty where the graphs are as the YAML says."""

    what: str
    asked: str
    found: str
    problems: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Mistake:
    """What is wrong on one rank. Ranks with the same mistake are told together."""

    rank: int
    text: str


def together(mistakes: Iterable[Mistake]) -> tuple[str, ...]:
    """Return one line for each different text, with all of its ranks."""
    ranks: dict[str, list[int]] = {}
    for mistake in mistakes:
        ranks.setdefault(mistake.text, []).append(mistake.rank)
    return tuple(f"{_ranks_text(numbers)}: {text}" for text, numbers in ranks.items())


def numbers_text(numbers: Sequence[int]) -> str:
    """``0-3, 8``; ``none`` of no numbers."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts) or "none"


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(set(ranks)) > 1)} {numbers_text(ranks)}"
