"""Plants every mistake and asks the check; says what was found, by what, and whether the place that it names is right."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from research.parallel_faults.cells import SCOPE, cell_of, locates
from research.parallel_faults.clusters import Cluster, answer, compiled_form
from research.parallel_faults.faults import Fault, faults_of
from research.parallel_faults.variations import variations

FORMS = (
    "split_vocabulary",
    "accumulation",
    "tied_in_chunks",
    "interleaved_rows",
    "context_parallel_windows",
    "grouped_experts",
    "experts",
    "sharded_accumulators",
    "gpipe",
)


@dataclass(frozen=True)
class Row:
    """One case: a mistake, or a correct run (``what`` is empty), and what the check said of it."""

    name: str
    what: str
    source: str
    found_by: str
    located: bool
    seconds: float
    places: tuple[str, ...] = ()
    where: str = ""

    @property
    def found(self) -> bool:
        """Whether the check said anything."""
        return bool(self.found_by)


def fault_rows(forms: Sequence[str], only: str, cache: Path, told: Callable[[str], None]) -> Iterator[Row]:
    """Every mistake of these forms whose name ``only`` is found in."""
    for form in forms:
        begun = time.monotonic()
        told(f"{form}: compiling")
        cluster = compiled_form(form, cache)
        told(f"{form}: compiled and trained in {time.monotonic() - begun:.0f} s")
        for fault in faults_of(form, cluster.graphs):
            if re.search(only, fault.name):
                yield row_of(cluster, fault)


def row_of(cluster: Cluster, fault: Fault) -> Row:
    """One mistake, planted and asked about."""
    said = answer(cluster, fault.plant(cluster.graphs))
    located = locates(said.where, fault.places, fault.between)
    return Row(fault.name, fault.what, fault.source, said.found_by, located, said.seconds, fault.places, said.where)


def variation_rows(only: str, cache: Path, told: Callable[[str], None]) -> Iterator[Row]:
    """Every correct run whose name ``only`` is found in."""
    for form, varied, keys in variations():
        name = f"{form}: {varied}"
        if not re.search(only, name):
            continue
        told(f"{name}: compiling")
        cluster = compiled_form(form, cache, keys)
        said = answer(cluster, cluster.graphs)
        yield Row(name, "", "", said.found_by, not said.found_by, said.seconds, (), said.where)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for programs."""
    return [asdict(row) for row in rows]


def summary(rows: Sequence[Row]) -> list[str]:
    """Counts in words: mistakes found and located, false alarms, seconds."""
    faults, correct = [row for row in rows if row.what], [row for row in rows if not row.what]
    lines = []
    if faults:
        found, located = (sum(map(bool, of)) for of in zip(*((row.found, row.located) for row in faults), strict=True))
        by = Counter(row.found_by or "nothing" for row in faults)
        lines += [
            f"{found} of {len(faults)} mistakes found, {located} located rightly ({100 * located / len(faults):.0f}%)",
            "by " + ", ".join(f"{name}: {count}" for name, count in by.most_common()),
            f"{sum(row.seconds for row in faults) / len(faults):.1f} processor seconds for each, beside compiling",
        ]
    if correct:
        lines.append(f"{sum(row.found for row in correct)} false alarms in {len(correct)} correct runs")
    return lines


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The table: a line for each kind of mistake, and what was found but not located; of correct runs a line each."""
    faults = [row for row in rows if row.what]
    if faults:
        yield "| planted | source | cases | found | located | seconds |"
        yield "|---|---|---|---|---|---|"
        for kind, cases in _by_kind(faults).items():
            found, located = sum(row.found for row in cases), sum(row.found and row.located for row in cases)
            seconds = sum(row.seconds for row in cases) / len(cases)
            source = _link(cases[0].source)
            yield f"| {kind}: {cases[0].what} | {source} | {len(cases)} | {found} | {located} | {seconds:.1f} |"
        yield ""
        for row in faults:
            if not (row.found and row.located):
                first = (
                    SCOPE.sub(lambda at: f" at {cell_of(at[1])}", row.where.splitlines()[0]) if row.where else "nothing"
                )
                yield f"- {row.name}: {', '.join(row.places[1:]) or 'around the model'}; said: {first}"
    for row in rows:
        if not row.what:
            yield f"- {row.name}: {'false alarm: ' + row.found_by if row.found else 'nothing found, as it should be'}"


def _by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(row.name.partition(": ")[2].rpartition(" ")[0], []).append(row)
    return kinds


def _link(source: str) -> str:
    return f"[{'/'.join(source.split('/')[-3:])}]({source})" if source.startswith("http") else source
