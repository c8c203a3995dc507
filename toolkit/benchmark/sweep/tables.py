"""The table of a sweep in Markdown and HTML: a row for each point, cells of axes that repeat merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from mindllm.units import GIB, MIB
from toolkit.benchmark.sweep.run import OK, Result

DECIMALS = {"per_s": 0, "_s": 3, "_mb": 3, "per_device": 0, "loss": 4, "parameters": 0, "utilisation": 3}
UNITS = {"_mb": "GB", "_s": "s"}
SCALES = {"_mb": MIB / GIB}
RATE = "per_s"
MILLION = 1e6
STYLE = (
    "table{border-collapse:collapse}td,th{border:1px solid #999;padding:.2em}td{text-align:right}.axis{text-align:left}"
)


def cells(result: Result, columns: Sequence[str]) -> list[str]:
    """Figures of a point; of one without them what came of it, in the first place."""
    deviations = result.get("deviations", {})
    found = [_figure(name, result["figures"].get(name), deviations.get(name)) for name in columns]
    return found if result["status"] == OK or not found else [_status(result, found[0]), *found[1:]]


def rows_of(axes: Sequence[str], columns: Sequence[str], results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """Labels and figures of every point, nothing merged."""
    for result in results:
        yield (*(result["labels"][axis] for axis in axes), *cells(result, columns))


def _status(result: Result, figure: str) -> str:
    return f"{result['status']} ({figure})" if figure else str(result["status"])


def _figure(name: str, value: Any, deviation: float | None = None) -> str:
    if value is None:
        return ""
    if name.endswith("parameters"):
        return f"{value / MILLION:,.4f} M"
    decimals = next((count for ending, count in DECIMALS.items() if name.endswith(ending)), 4)
    scale = next((size for ending, size in SCALES.items() if name.endswith(ending)), 1.0)
    spread = "" if deviation is None else f" ± {deviation * scale:,.{decimals}f}"
    return f"{value * scale:,.{decimals}f}{spread}"


def headings(axes: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Axes by the last part of their key, figures with their units."""
    return [*(axis.rpartition(".")[2] for axis in axes), *map(_heading, columns)]


def _heading(name: str) -> str:
    for ending, unit in UNITS.items():
        if name.endswith(ending) and not name.endswith(RATE):
            return f"{name.removesuffix(ending).replace('_', ' ')}, {unit}"
    return name.replace("_", " ")


def spans(labels: Sequence[Mapping[str, str]], axes: Sequence[str]) -> list[list[int]]:
    """By row and axis how many rows a cell stands for; 0 where the one above stands for this row, too.

    A cell is merged with the one above where all axes before it are the same as well.
    """
    rows = [tuple(label[axis] for axis in axes) for label in labels]
    found = [[1] * len(axes) for _ in rows]
    for place in range(len(axes)):
        first = 0
        for number in range(1, len(rows)):
            if rows[number][: place + 1] == rows[first][: place + 1]:
                found[first][place] += 1
                found[number][place] = 0
            else:
                first = number
    return found


def markdown(title: str, axes: Sequence[str], columns: Sequence[str], results: Sequence[Result]) -> str:
    """Markdown has no merged cells: those that repeat are left empty. Reasons stand below."""
    merged = spans([result["labels"] for result in results], axes)
    lines = [_line(headings(axes, columns)), _line(["---"] * (len(axes) + len(columns)))]
    for result, span in zip(results, merged, strict=True):
        names = [result["labels"][axis] if count else "" for axis, count in zip(axes, span, strict=True)]
        lines.append(_line([*names, *cells(result, columns)]))
    reasons = "".join(f"- {text}\n" for text in reasons_of(results))
    return f"## {title}\n\n" + "\n".join(lines) + "\n" + (f"\n{reasons}" if reasons else "")


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def reasons_of(results: Sequence[Result]) -> list[str]:
    """Why points have no figures, and what figures leave out, each reason once."""
    found = [f"{result['status']}: {result['why'].splitlines()[0]}" for result in results if result["why"]]
    return list(dict.fromkeys(found))


def html(title: str, axes: Sequence[str], columns: Sequence[str], results: Sequence[Result]) -> str:
    """A page with the table, cells that repeat as one over several rows."""
    merged = spans([result["labels"] for result in results], axes)
    rows = []
    for result, span in zip(results, merged, strict=True):
        names = "".join(
            f'<td class="axis" rowspan="{count}">{escape(result["labels"][axis])}</td>'
            for axis, count in zip(axes, span, strict=True)
            if count
        )
        figures = "".join(f"<td>{escape(cell)}</td>" for cell in cells(result, columns))
        rows.append(f'<tr title="{escape(result["why"])}">{names}{figures}</tr>')
    head = "".join(f"<th>{escape(name)}</th>" for name in headings(axes, columns))
    table = f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "\n</table>"
    reasons = "".join(f"<li>{escape(text)}</li>" for text in reasons_of(results))
    page = f"<h1>{escape(title)}</h1>\n{table}\n<ul>{reasons}</ul>\n"
    return f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>\n{page}'
