"""Fewer layers: which are kept, the plan of those, and the keys of a run that has no others.

A reduced run has at least one layer of every kind (:class:`LayerKind`) that it stands for, in the order of the model.
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
    """Return the keys of a run with which the layers of ``model`` are these.

    What a directory says of a model is in its keys by now; it has all layers, and no run of fewer may begin from it.
    """
    keys = {f"model.model_config.{key}": value for key, value in keys_for_layers(model, specs).items()}
    return {"run_mode": "train", **dict.fromkeys(DIRECTORY_KEYS, ""), **keys}


def placed_layers(model: ModelConfig, specs: Sequence[LayerSpec], plan: LayerPlan) -> dict[str, Any]:
    """Return the keys of a run with which the layers of ``model`` are these, in the places and recomputed as in ``plan``."""
    return {**layer_keys(model, specs), **render_plan(plan)}


def unfolded(config: RunConfig) -> dict[str, Any]:
    """Return the key with which a run has no V, which needs two chunks per stage; none where it has none."""
    return {"parallel.pipeline_config.pipeline_scheduler": "1f1b"} if config.parallel.pipeline_config.v_shape else {}


def kept_layers(config: RunConfig, stages: Sequence[int] | None = None) -> list[int]:
    """Return the numbers of the layers that are kept: one of every kind in every place; ``stages``: those of these stages."""
    plan, specs = make_plan(config), config.model.config.architecture.layers
    kept = one_of_every_kind(plan, specs, config.model.config.fine_grain_interleave > 1)
    return kept if stages is None else [number for number in kept if plan.layers[number].stage in stages]


def kept_plan(config: RunConfig, kept: Sequence[int]) -> LayerPlan:
    """Return the plan of the layers that are kept, on the stages that hold one, counted from 0."""
    whole = make_plan(config)
    layers = [whole.layers[number] for number in kept]
    stages = sorted({layer.stage for layer in layers})
    return replace(
        whole,
        stages=len(stages),
        layers=tuple(replace(layer, stage=stages.index(layer.stage)) for layer in layers),
    )


def one_of_every_kind(plan: LayerPlan, specs: Sequence[LayerSpec], ends_differ: bool = False) -> list[int]:
    """Return the numbers of few layers that show what ``plan`` has: every kind of layer of every place, and uneven stages.

    A kind is a specification and a recomputation, and where ``ends_differ`` whether it is the model's first or last layer.
    Numbers may repeat, but for those of layers that predict ahead, which stay the last ones.
    """
    ends = (0, len(specs) - 1) if ends_differ else ()
    ahead = {number for number, spec in enumerate(specs) if spec.is_mtp}
    more = _more_layers(plan)
    kept: list[int] = []
    for chunk, stage in plan.places:
        place = [n for n, layer in enumerate(plan.layers) if (layer.chunk, layer.stage) == (chunk, stage)]
        kinds: dict[Hashable, int] = {}
        for number in place:
            end = number if number in ends else None
            kinds.setdefault((end, plan.layers[number].kind(specs[number])), number)
        at_least = min(len(place), FEWEST_LAYERS) if plan.stages == 1 else 1
        first_of_each = [number for number in kinds.values() if number not in ahead]
        last = [number for number in place if number in ahead]
        wanted = at_least + more[chunk, stage] - len(last)
        kept += first_of_each + first_of_each[-1:] * (wanted - len(first_of_each)) + last
    return kept


def _more_layers(plan: LayerPlan) -> dict[tuple[int, int], int]:
    """How many more layers than the fewest each place ``(chunk, stage)`` keeps.

    Of every chunk the first place that has more than an even split keeps one more: places of unequal length are compiled, and
    each further layer would cost as much as any. That the layers of the whole run are where its keys say is asked of the plan,
    not of the small model.
    """
    counts = {(chunk, stage): plan.counts[chunk][stage] for chunk, stage in plan.places}
    even = len(plan.layers) // len(plan.places)
    larger = sorted(place for place, count in counts.items() if count > even)
    first = {chunk: (chunk, stage) for chunk, stage in reversed(larger)}
    return {place: int(place in first.values()) for place in counts}
