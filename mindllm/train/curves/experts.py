"""Drawing the tokens that each expert got: a strip per layer, experts over steps, relative to an even share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.files import atomic_path
from mindllm.train.curves.draw import Run

COLUMNS = 4
LIGHTEST, DARKEST = 0.0, 2.0  # of an even share


def expert_shares(run: Run) -> dict[int, list[tuple[int, list[float], float]]]:
    """By layer and step: tokens of every expert relative to an even share, and the part of all choices that was dropped.

    Raises:
        UserError: the metrics say nothing of experts.
    """
    found: dict[int, list[tuple[int, list[float], float]]] = {}
    for record in run.steps:
        for load in record.get("experts") or ():
            total = max(sum(load["tokens"]), 1)
            shares = [count * len(load["tokens"]) / total for count in load["tokens"]]
            found.setdefault(load["layer"], []).append((record["step"], shares, load["dropped"] / total))
    if not found:
        raise UserError(f"{run.name}: its metrics say nothing of experts; give a run of a model that has some")
    return found


def draw_experts(run: Run, path: Path) -> None:
    """Writes the picture as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = expert_shares(run)
    columns = min(COLUMNS, len(layers))
    rows = math.ceil(len(layers) / columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(3.2 * columns, 2.4 * rows), squeeze=False, constrained_layout=True
    )
    places = list(grid.flat)
    for axes, (layer, loads) in zip(places, sorted(layers.items()), strict=False):
        strip = _draw_layer(axes, layer, loads)
    for axes in places[len(layers) :]:
        axes.set_visible(False)
    figure.colorbar(strip, ax=grid, label="of an even share")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)


def _draw_layer(axes: Any, layer: int, loads: list[tuple[int, list[float], float]]) -> Any:
    steps = [step for step, _, _ in loads]
    columns = [shares for _, shares, _ in loads]
    experts = len(columns[0])
    dropped = sum(part for _, _, part in loads) / len(loads)
    strip = axes.imshow(
        list(zip(*columns, strict=True)),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, -0.5, experts - 0.5),
        vmin=LIGHTEST,
        vmax=DARKEST,
        cmap="viridis",
    )
    axes.set(title=f"layer {layer}, {dropped:.1%} dropped", xlabel="step", ylabel="expert")
    return strip
