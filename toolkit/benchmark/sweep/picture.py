"""Figures of a sweep as bars: the last axis from left to right, the combinations of the others side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence

from toolkit.benchmark.sweep.run import OUT_OF_MEMORY, Result

SHOWN = 4  # figures, the first ones that any point has
WIDTH, HEIGHT = 7.0, 3.0  # inches of one figure
BARS = 0.8  # of the room of a label
LETTERS = 50  # of all labels, which stand side by side upright


def series(axes: Sequence[str], results: Sequence[Result]) -> tuple[list[str], dict[str, dict[str, Result]]]:
    """Labels of the last axis, and by the labels of the others the results at each of these."""
    *others, last = axes
    found: dict[str, dict[str, Result]] = {}
    for result in results:
        name = ", ".join(result["labels"][axis] for axis in others)
        found.setdefault(name, {})[result["labels"][last]] = result
    return list(dict.fromkeys(result["labels"][last] for result in results)), found


def draw(title: str, axes: Sequence[str], columns: Sequence[str], results: Sequence[Result]) -> bytes:
    """A picture in PNG; empty where no point has a figure. Raises ModuleNotFoundError without matplotlib."""
    names = [name for name in columns if any(result["figures"].get(name) for result in results)][:SHOWN]
    if not names:
        return b""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels, found = series(axes, results)
    figure, plots = pyplot.subplots(
        len(names), 1, figsize=(WIDTH, HEIGHT * len(names)), squeeze=False, layout="constrained"
    )
    for name, plot in zip(names, plots[:, 0], strict=True):
        for number, (group, points) in enumerate(found.items()):
            width = BARS / len(found)
            places = [index - BARS / 2 + width * (number + 0.5) for index in range(len(labels))]
            shown = [points.get(label) for label in labels]
            heights = [(point["figures"].get(name) or 0) if point else 0 for point in shown]
            spreads = [(point.get("deviations", {}).get(name) or 0) if point else 0 for point in shown]
            plot.bar(places, heights, width, label=group or None, yerr=spreads if any(spreads) else None)
            for place, point in zip(places, shown, strict=True):
                if point is not None and point["status"] == OUT_OF_MEMORY:
                    plot.text(place, 0, " out of memory", rotation=90, ha="center", va="bottom", fontsize=7)
        leaning = sum(map(len, labels)) > LETTERS
        plot.set_xticks(range(len(labels)), labels, rotation=30 if leaning else 0, ha="right" if leaning else "center")
        plot.set_xlabel(axes[-1].rpartition(".")[2])
        plot.set_ylabel(name.replace("_", " "))
        if len(axes) > 1:
            plot.legend(fontsize=7)
    figure.suptitle(title)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    pyplot.close(figure)
    return content.getvalue()
