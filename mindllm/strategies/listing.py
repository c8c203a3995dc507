"""All strategies of a search as one list: its table, page, JSON and CSV show the same figures."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.files import atomic_open
from mindllm.strategies.judge import Judged
from mindllm.strategies.search import Planned
from mindllm.units import GIB

PLANNED, ESTIMATED, AS_WRITTEN = "planned", "estimated", "as written"
FORMULA, DRY_RUN = "formula", "dry run"


@dataclass(frozen=True)
class Entry(Judged):
    """A strategy of the list.

    Attributes:
        seconds: of a step.
        source: ``planned``: layers and recomputation by the planner; ``estimated``: layers spread evenly, the first ones
            recomputed until they fit; ``as written``: the run as its YAML is.
        memory_source: ``formula`` or ``dry run``.
        fits: whether every stage is within the limit.
    """

    seconds: float
    source: str
    memory_source: str
    fits: bool

    @property
    def name(self) -> str:
        """The strategy in words."""
        return f"YAML: {self.candidate.name}" if self.source == AS_WRITTEN else self.candidate.name

    @property
    def peak(self) -> float:
        """Bytes of the fullest stage."""
        return max(self.memory)

    def tree(self) -> dict[str, Any]:
        """Return the entry as plain values, in seconds and bytes."""
        return {
            "name": self.name,
            "strategy": self.candidate.tree(),
            "seconds": self.seconds,
            "tokens_per_second_per_device": self.speed,
            "memory": list(self.memory),
            "fits": self.fits,
            "source": self.source,
            "memory_source": self.memory_source,
        }


def list_strategies(
    judged: Iterable[Judged], planned: Sequence[Planned], hand: Planned | None, limit: float
) -> tuple[Entry, ...]:
    """Return every strategy and the YAML as it is, the fastest first: planned if it was planned, otherwise estimated.

    Strategies that do not fit ``limit`` bytes come last.
    """
    runs = [(run, PLANNED) for run in planned] + ([(hand, AS_WRITTEN)] if hand else [])
    entries = [
        Entry(one.candidate, one.step.tokens_per_device, one.memory, one.step.seconds, source,
              DRY_RUN if one.simulated else FORMULA, one.room(limit).fits)
        for one, source in runs
    ]  # fmt: skip
    step = runs[0][0].step
    rate = step.seconds * step.tokens_per_device  # all strategies train the same tokens on the same devices
    planned_candidates = {one.candidate for one in planned}
    entries += [
        Entry(one.candidate, one.speed, one.memory, rate / one.speed, ESTIMATED, FORMULA, max(one.memory) <= limit)
        for one in judged
        if one.candidate not in planned_candidates
    ]
    return tuple(sorted(entries, key=lambda entry: (not entry.fits, -entry.speed)))


def write_csv(entries: Sequence[Entry], path: Path) -> None:
    """Write the list as CSV: rank, figures and the fields of every strategy."""
    with atomic_open(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        fields = _fields(entries[0])
        writer.writerow(
            (
                "rank",
                "strategy",
                "step_s",
                "tokens_per_second_per_device",
                "peak_gb",
                "fits",
                "source",
                "memory_source",
                *fields,
            )
        )
        for rank, entry in enumerate(entries, 1):
            figures = (entry.seconds, entry.speed, entry.peak / GIB, entry.fits, entry.source, entry.memory_source)
            writer.writerow((rank, entry.name, *figures, *_fields(entry).values()))


def _fields(entry: Entry) -> dict[str, Any]:
    """Return the fields of a strategy, nested ones with dotted names."""
    fields: dict[str, Any] = {}
    for key, value in entry.candidate.tree().items():
        nested = value if isinstance(value, dict) else None
        fields.update({f"{key}.{name}": part for name, part in nested.items()} if nested is not None else {key: value})
    return fields
