"""A layer plan as text: log lines of the normalized plan, and the lists of a YAML with this plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

from mindllm.architecture.layer_counts import StageLayers
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, EXCLUDES, LayerAssignment, LayerPlan, assignments


def plan_lines(plan: LayerPlan) -> list[str]:
    """Return the normalized plan as log lines in MindFormers' words."""
    sums = list(itertools.accumulate(plan.counts[chunk][stage] for chunk, stage in plan.places))
    rows = [sums[start : start + plan.stages] for start in range(0, len(sums), plan.stages)]
    lines = [
        f"num_layers per stage: {_lists(plan.counts)}",
        f"Accumulated num_layers per stage: {rows}",
        f"Pipeline id list with start_stage: {[layer.stage for layer in plan.layers]}",
        f"Interleave id list: {[layer.chunk for layer in plan.layers]}",
        f"Formative layer_recompute: {_lists(_full_counts(plan))}",
    ]
    for key in DEFAULT_PATTERNS:
        formative = {pattern: _lists(counts) for pattern, counts in _pattern_counts(plan, key).items()}
        lines.append(f"Formative {key}: {formative}")
    return lines


def render_plan(plan: LayerPlan) -> dict[str, object]:
    """Return a plan as YAML values by dotted key. A configuration with these values has this plan.

    Raises:
        UserError: recomputed layers that are not the first ones of their place, which no list can express; a pattern
            both selected and excluded.
    """
    for key, pattern in plan.contradictions():
        raise UserError(f"layer plan: '{pattern}' is both under {key} and under {EXCLUDES[key]}")
    average = len(plan.layers) // (plan.stages * plan.chunks)
    offset = tuple(tuple(count - average for count in row) for row in plan.counts)
    full = _full_counts(plan)
    selected = {key: _pattern_counts(plan, key) for key in DEFAULT_PATTERNS}
    reread = tuple(assignments(plan.counts, full, selected, plan.v_shape))
    for number, (layer, read) in enumerate(zip(plan.layers, reread, strict=True)):
        if layer != read:
            raise UserError(
                f"layer plan: no list can express that layer {number} has {_described(layer)}: counts take the first layers "
                f"of chunk {layer.chunk} of stage {layer.stage}"
            )
    return {
        "model.model_config.offset": _yaml_counts(offset),
        "model.model_config.pp_interleave_num": plan.chunks,
        "parallel_config.pipeline_stage": plan.stages,
        "recompute_config.recompute": _yaml_counts(full),
        **{f"recompute_config.{key}": _yaml_selection(counts) for key, counts in selected.items()},
    }


def _full_counts(plan: LayerPlan) -> StageLayers:
    return _per_place(plan, lambda layers: sum(layer.recompute for layer in layers))


def _pattern_counts(plan: LayerPlan, key: str) -> dict[str, StageLayers]:
    """Return for each pattern the count that reaches its last layer. Fully recomputed layers before it need no pattern."""

    def reach(pattern: str, layers: tuple[LayerAssignment, ...]) -> int:
        return max((index + 1 for index, layer in enumerate(layers) if pattern in layer.applied(key)), default=0)

    return {pattern: _per_place(plan, partial(reach, pattern)) for pattern in plan.named(key)}


def _per_place(plan: LayerPlan, count: Callable[[tuple[LayerAssignment, ...]], int]) -> StageLayers:
    return tuple(tuple(count(plan.at(chunk, stage)) for stage in range(plan.stages)) for chunk in range(plan.chunks))


def _described(layer: LayerAssignment) -> str:
    patterns = {key: list(names) for key, names in layer.patterns.items()}
    return "full recomputation" if layer.recompute and not patterns else f"recompute {layer.recompute}, {patterns}"


def _yaml_selection(counts: Mapping[str, StageLayers]) -> object:
    return {pattern: _yaml_counts(spread) for pattern, spread in counts.items()} or False


def _yaml_counts(counts: StageLayers) -> list[int] | list[list[int]]:
    """Return one list for a single chunk, or a list for each chunk."""
    return list(counts[0]) if len(counts) == 1 else _lists(counts)


def _lists(counts: StageLayers) -> list[list[int]]:
    return [list(row) for row in counts]
