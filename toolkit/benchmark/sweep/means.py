"""Points that differ in one axis alone, such as the seed, as one row: means of their figures, and how far they lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from toolkit.benchmark.sweep.run import OK, Result


def mean_rows(axis: str, results: Sequence[Result]) -> list[Result]:
    """A row for every combination of the other axes, in the order of its first point.

    ``figures`` are means over the points that came to an end, ``deviations`` the standard deviations of a sample, where
    there are several and they differ. A row with a point that did not come to an end has that one's status.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in results:
        others = tuple((name, label) for name, label in result["labels"].items() if name != axis)
        groups.setdefault(others, []).append(result)
    return [_row(dict(labels), group) for labels, group in groups.items()]


def _row(labels: dict[str, str], group: Sequence[Result]) -> Result:
    finished = [result for result in group if result["status"] == OK]
    first = next((result for result in group if result["status"] != OK), group[0])
    status = first["status"]
    if finished and len(finished) < len(group):
        status = f"{status} ({len(group) - len(finished)} of {len(group)})"
    figures: dict[str, float | None] = {}
    deviations: dict[str, float] = {}
    for name in {name: None for result in finished or group for name in result["figures"]}:
        values = [result["figures"].get(name) for result in finished or group]
        known = [value for value in values if value is not None]
        figures[name] = statistics.fmean(known) if known else None
        if len(set(known)) > 1:
            deviations[name] = statistics.stdev(known)
    return {"labels": labels, "status": status, "why": first["why"], "figures": figures, "deviations": deviations}
