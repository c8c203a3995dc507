"""Fewer layers: the layers to keep, their plan, and the keys of a run with only these.

A reduced run has at least one layer of every kind (:class:`LayerKind`) that it represents, in model order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from mindllm.architecture.layer import LayerSpec
from mindllm.config import ModelConfig, RunConfig, keys_for_layers
from mindllm.config.reading.pretrained import DIRECTORY_KEYS
from mindllm.parallel.layer_plan import LayerPlan, make_plan
from mindllm.parallel.plan_text import render_plan

FEWEST_LAYERS = 2  # of a model without stages


def layer_keys(model: ModelConfig, specs: Sequence[LayerSpec]) -> dict[str, Any]:
    """Return the keys of a run whose model has the layers ``specs``.

    The keys already include the values of a pretrained directory, which cannot initialize a run with fewer layers.
    """
    keys = {f"model.model_config.{key}": value for key, value in keys_for_layers(model, specs).items()}
    return {"run_mode": "train", **dict.fromkeys(DIRECTORY_KEYS, ""), **keys}


def placed_layers(model: ModelConfig, specs: Sequence[LayerSpec], plan: LayerPlan) -> dict[str, Any]:
    """Return the keys of a run with these layers, placed and recomputed as in ``plan``."""
    return {**layer_keys(model, specs), **render_plan(plan)}


def unfolded(config: RunConfig) -> dict[str, Any]:
    """Return the key of a run without a V, which needs two chunks per stage; empty if the run has none."""
    return {"parallel.pipeline_config.pipeline_scheduler": "1f1b"} if config.parallel.pipeline_config.v_shape else {}


def kept_layers(config: RunConfig, stages: Sequence[int] | None = None) -> list[int]:
    """Return the numbers of the layers to keep: one of every kind in every place, or in those of ``stages``."""
    plan, specs = make_plan(config), config.model.config.architecture.layers
    selected = one_of_every_kind(plan, specs, config.model.config.fine_grain_interleave > 1)
    return selected if stages is None else [number for number in selected if plan.layers[number].stage in stages]


def kept_plan(config: RunConfig, kept: Sequence[int]) -> LayerPlan:
    """Return the plan of the kept layers, on the stages that have one, counted from 0."""
    full = make_plan(config)
    layers = [full.layers[number] for number in kept]
    stages = sorted({layer.stage for layer in layers})
    return replace(
        full,
        stages=len(stages),
        layers=tuple(replace(layer, stage=stages.index(layer.stage)) for layer in layers),
    )


def one_of_every_kind(plan: LayerPlan, specs: Sequence[LayerSpec], ends_differ: bool = False) -> list[int]:
    """Return the numbers of a few layers with every kind of layer of every place in ``plan``, and uneven stages.

    A kind is a specification and a recomputation. With ``ends_differ`` the first and last layer of the model are kinds, too.
    Numbers may repeat, except layers that predict ahead, which stay last.
    """
    ends = (0, len(specs) - 1) if ends_differ else ()
    mtp = {number for number, spec in enumerate(specs) if spec.is_mtp}
    more = _more_layers(plan)
    selected: list[int] = []
    for chunk, stage in plan.places:
        place = [n for n, layer in enumerate(plan.layers) if (layer.chunk, layer.stage) == (chunk, stage)]
        kinds: dict[Hashable, int] = {}
        for number in place:
            end = number if number in ends else None
            kinds.setdefault((end, plan.layers[number].kind(specs[number])), number)
        at_least = min(len(place), FEWEST_LAYERS) if plan.stages == 1 else 1
        first_by_kind = [number for number in kinds.values() if number not in mtp]
        last = [number for number in place if number in mtp]
        count = at_least + more[chunk, stage] - len(last)
        selected += first_by_kind + first_by_kind[-1:] * (count - len(first_by_kind)) + last
    return selected


def _more_layers(plan: LayerPlan) -> dict[tuple[int, int], int]:
    """Return the additional layers that each place ``(chunk, stage)`` keeps beyond the fewest.

    In every chunk, the first place with more layers than an even split keeps one more, so that places of unequal length are
    compiled. Each additional layer would cost as much. The plan, not the small model, checks the places of all layers.
    """
    counts = {(chunk, stage): plan.counts[chunk][stage] for chunk, stage in plan.places}
    even = len(plan.layers) // len(plan.places)
    larger = sorted(place for place, count in counts.items() if count > even)
    first = {chunk: (chunk, stage) for chunk, stage in reversed(larger)}
    return {place: int(place in first.values()) for place in counts}
