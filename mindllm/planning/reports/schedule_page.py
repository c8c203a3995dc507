"""Schedules as zoomable pages without network access: operations with their names, memory of every stage, the plan."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.files import atomic_open
from mindllm.planning.plan import Evaluation
from mindllm.schedules.operations import BACKWARD, WEIGHT
from mindllm.terminal.page import beside_proof, fill, json_markup, mark
from mindllm.units import MIB, gigabytes

TEMPLATE = Path(__file__).with_name("schedule.html")
DIGITS = 9  # of the longest time


def write_page(evaluation: Evaluation, path: Path, kinds: Sequence[tuple[str, str]], note: str = "") -> None:
    """Write the page; arguments as for :func:`render_page`."""
    text = render_page(evaluation, kinds, note, beside_proof(path.parent))
    with atomic_open(path) as file:
        file.write(text)


def render_page(
    evaluation: Evaluation, kinds: Sequence[tuple[str, str]], note: str = "", to_proof: bool = False
) -> str:
    """Return the page as HTML.

    Args:
        evaluation: the plan and its schedule.
        kinds: name and colour of forward, backward and weight-gradient operations.
        note: added to the line below the title.
        to_proof: add a link back to the proof of the run.
    """
    data = json_markup(page_data(evaluation, kinds, note))
    markup = {"mark": mark("schedule", to_proof), "rows": _rows(evaluation), "data": data}
    return fill(TEMPLATE, {"title": evaluation.problem.name}, markup)


def page_data(evaluation: Evaluation, kinds: Sequence[tuple[str, str]], note: str = "") -> dict[str, Any]:
    """Return start, kind, chunk and micro-batch of the operations of each stage in order, and pass times by place."""
    line, problem, costs = evaluation.line, evaluation.problem, evaluation.costs
    scale = 10 ** max(0, DIGITS - len(f"{line.end.max():.0f}"))
    stages = []
    activation = costs.activation.reshape(problem.chunks, problem.stages)
    for stage in range(problem.stages):
        mine = np.flatnonzero(line.table.place % problem.stages == stage)
        activations = line.memory_curve(stage, activation[:, stage])[1]
        stages.append({
            "start": (np.rint(line.start[mine] * scale) / scale).tolist(),
            "what": line.table.what[mine].tolist(),
            "chunk": (line.table.place[mine] // problem.stages).tolist(),
            "micro": line.table.micro[mine].tolist(),
            "fixed": round(float(evaluation.peak_mb[stage] - activations.max()), 1),
            "kept": np.round(activation[:, stage], 3).tolist(),
        })  # fmt: skip
    limits = [limit if np.isfinite(limit) else None for limit in problem.per_stage("limit_mb")]
    return {
        "stages": stages,
        "times": [part.reshape(problem.chunks, problem.stages).tolist() for part in costs.times],
        "freed": [BACKWARD, WEIGHT],
        "kinds": [list(kind) for kind in kinds],
        "end": float(line.end.max()) or 1.0,
        "limits": limits,
        "title": f"{_title(evaluation)}{f'; {note}' if note else ''}",
        "repeated": line.repeated,
    }


def _title(evaluation: Evaluation) -> str:
    problem = evaluation.problem
    return f"{problem.pipeline}, step {evaluation.reported_step:,.6g}, bubble {100 * evaluation.bubble.mean():.1f}%"


def _rows(evaluation: Evaluation) -> str:
    """Return table rows of the plan by stage."""
    problem, gb = evaluation.problem, gigabytes(evaluation.peak_mb, MIB)
    rows = []
    for stage in range(problem.stages):
        mine = range(stage, problem.places, problem.stages)
        names = [name for place in mine for name in evaluation.plan.places[place]]
        mix = ", ".join(f"{names.count(kind)} {kind}" for kind in problem.kind_names if kind in names)
        layers = "+".join(str(evaluation.plan.counts[place]) for place in mine)
        cells = (stage, layers, mix, gb(evaluation.peak_mb[stage]), f"{100 * evaluation.bubble[stage]:.1f}%")
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return "\n".join(rows)
