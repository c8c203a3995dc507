"""The different layers of a model that is planned, by the names that its problem and its small runs have for them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig

LAYER = "layer"


def layers_by_name(config: RunConfig) -> dict[str, LayerKind]:
    """Return the kinds of the model's layers, none recomputed, in the order in which they first appear."""
    specs = config.model.config.architecture.specifications()
    if len(specs) == 1:
        return {LAYER: LayerKind()}
    names = [spec.name for spec in specs]
    return {
        spec.name if names.count(spec.name) == 1 else f"{spec.name} {number}": LayerKind(spec=spec)
        for number, spec in enumerate(specs, start=1)
    }


def main_and_ahead(layers: Mapping[str, LayerKind]) -> tuple[list[str], str | None]:
    """Return the names of the layers without the one that predicts ahead, and that one's, if there is one."""
    names = {False: list[str](), True: list[str]()}
    for name, kind in layers.items():
        names[kind.is_mtp].append(name)
    return names[False], names[True][0] if names[True] else None


def check_ahead(config: RunConfig) -> None:
    """Refuses what the planner cannot say of layers that predict ahead.

    They are the last ones of the order, so a single one is on the last stage whatever is planned.

    Raises:
        UserError: there are several.
    """
    ahead = config.model.config.num_nextn_predict_layers
    if ahead > 1:
        message = (
            f"all of them have to be on the last stage, which the planner asks of one layer only (value {ahead}); "
            "write 1 or 0"
        )
        raise config.error("model.model_config.num_nextn_predict_layers", message)


def layer_runs(config: RunConfig) -> list[tuple[str, int]]:
    """Return the layers of the model in order: names of consecutive ones that are alike, and how many."""
    name_of = {kind.spec: name for name, kind in layers_by_name(config).items()}
    if len(name_of) == 1:
        return [(LAYER, config.model.config.layer_count)]
    runs = itertools.groupby(config.model.config.architecture.layers)
    return [(name_of[spec], len(list(layers))) for spec, layers in runs]
