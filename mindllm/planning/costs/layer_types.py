"""The different layers of a model that is planned, as its problem and its small runs have them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindllm.architecture.layer import LayerSpec
from mindllm.config import RunConfig
from mindllm.dry_run.stages import LayerKind
from mindllm.planning.costs.offered_kinds import layer_kind
from mindllm.planning.problem import RecomputeKind

LAYER = "layer"


@dataclass(frozen=True)
class LayerType:
    """One of the different layers of a model; ``spec`` is None where all are alike, as in a :class:`LayerKind`."""

    name: str
    spec: LayerSpec | None = None

    @property
    def is_mtp(self) -> bool:
        """Whether it is one of those behind the others, which are all on the last stage."""
        return self.spec is not None and self.spec.is_mtp

    def kind(self, recompute: RecomputeKind) -> LayerKind:
        """Such a layer, recomputed in this way."""
        return replace(layer_kind(recompute), spec=self.spec)


def layer_types(config: RunConfig) -> tuple[LayerType, ...]:
    """The types of the model's layers, in the order in which they first appear, under different names."""
    specs = config.model.config.architecture.kinds()
    if len(specs) == 1:
        return (LayerType(LAYER),)
    names = [spec.name for spec in specs]
    return tuple(
        LayerType(spec.name if names.count(spec.name) == 1 else f"{spec.name} {number}", spec)
        for number, spec in enumerate(specs, start=1)
    )


def main_and_ahead(types: Sequence[LayerType]) -> tuple[tuple[LayerType, ...], LayerType | None]:
    """The types of layers without the one that predicts ahead, and that one, if there is one."""
    ahead = [layer for layer in types if layer.is_mtp]
    return tuple(layer for layer in types if not layer.is_mtp), ahead[0] if ahead else None


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


def layer_runs(config: RunConfig) -> list[tuple[LayerType, int]]:
    """The layers of the model in order: consecutive ones of a type, and how many."""
    types = layer_types(config)
    if len(types) == 1:
        return [(types[0], config.model.config.layer_count)]
    of_spec = {layer.spec: layer for layer in types}
    runs = itertools.groupby(config.model.config.architecture.layers)
    return [(of_spec[spec], len(list(layers))) for spec, layers in runs]
