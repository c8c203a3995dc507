"""The plan of a run per layer: which stage and chunk it lives on, and what of it is computed again in the backward pass.

Reads ``offset`` and the lists of ``recompute_config`` with MindFormers' meaning (class ``LayerSetting``): layers are placed
chunk by chunk, inside a chunk stage by stage, or back from the last one where chunks lie in a V; counts are those of a stage
also there, and take the first layers of their place; a count for a whole stage goes round robin over its chunks.
``plan_text`` writes a plan back as such lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.layer_counts import StageLayers, layer_counts, places_in_order
from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RecomputeConfig, RunConfig
from mindllm.config.recompute import LayerCounts, LayerSelection
from mindllm.errors import UserError

DEFAULT_PATTERNS: dict[str, tuple[str, ...]] = {
    "select_recompute": (r"feed_forward\.mul", r"feed_forward\.w1\.activation\..*"),
    "select_comm_recompute": (r".*\.norm",),
    "select_recompute_exclude": (),
    "select_comm_recompute_exclude": (),
}
"""Keys of operator patterns, and the patterns that plain counts stand for (MindFormers' defaults, with any activation)."""
EXCLUDES = {
    "select_recompute": "select_recompute_exclude",
    "select_comm_recompute": "select_comm_recompute_exclude",
}


@dataclass(frozen=True)
class LayerAssignment:
    """One layer: its place in the pipeline, and its recomputation.

    ``patterns`` holds, by key of ``recompute_config``, the operator patterns that apply to this layer, sorted. A fully
    recomputed layer has none under the two select keys.
    """

    stage: int
    chunk: int = 0
    recompute: bool = False
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        occupied = {key: tuple(sorted(patterns)) for key, patterns in self.patterns.items() if patterns}
        object.__setattr__(self, "patterns", occupied)

    @classmethod
    def of_kind(cls, kind: LayerKind, stage: int, chunk: int = 0) -> LayerAssignment:
        """Return a layer of this kind at a place of the pipeline."""
        return cls(stage, chunk, kind.recompute, dict(kind.patterns))

    def kind(self, spec: LayerSpec | None = None) -> LayerKind:
        """Return the kind of the layer, whose specification is ``spec``."""
        return LayerKind(self.recompute, tuple(sorted(self.patterns.items())), spec)

    def applied(self, key: str) -> tuple[str, ...]:
        """Return the patterns under one key of ``recompute_config``."""
        return tuple(self.patterns.get(key, ()))

    def is_default(self, key: str) -> bool:
        """Return True if several patterns apply and are those that plain counts select."""
        return len(DEFAULT_PATTERNS[key]) > 1 and set(DEFAULT_PATTERNS[key]) == set(self.applied(key))


@dataclass(frozen=True)
class LayerPlan:
    """All layers in model order, over ``stages`` x ``chunks`` places, which lie in a V where ``v_shape``."""

    stages: int
    chunks: int
    layers: tuple[LayerAssignment, ...]
    v_shape: bool = False

    def __post_init__(self) -> None:
        occupied = list(dict.fromkeys((layer.chunk, layer.stage) for layer in self.layers))
        if set(occupied) != set(self.places):
            raise UserError(f"layer plan: each of {self.stages} stages x {self.chunks} chunks must hold a layer")
        numbers = {place: number for number, place in enumerate(self.places)}
        order = [numbers[layer.chunk, layer.stage] for layer in self.layers]
        if order != sorted(order):
            raise UserError("layer plan: layers must be placed chunk by chunk, and inside a chunk stage by stage")

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Every ``(chunk, stage)`` in the order of the model."""
        return places_in_order(self.stages, self.chunks, self.v_shape)

    @property
    def last_place(self) -> int:
        """The number (chunk x stages + stage) of the place of the last layer."""
        chunk, stage = self.places[-1]
        return chunk * self.stages + stage

    @property
    def layers_by_place(self) -> tuple[range, ...]:
        """Numbers of the layers of each place (chunk x stages + stage)."""
        ends = list(accumulate(self.counts[chunk][stage] for chunk, stage in self.places))
        layers = {at: range(end - self.counts[at[0]][at[1]], end) for at, end in zip(self.places, ends, strict=True)}
        return tuple(layers[at] for at in sorted(layers))

    @property
    def last_stage(self) -> int:
        """The stage of the last layer, with the head and the loss."""
        return self.places[-1][1]

    @property
    def counts(self) -> StageLayers:
        """Layers of each ``[chunk][stage]``."""
        counts = Counter((layer.chunk, layer.stage) for layer in self.layers)
        return tuple(tuple(counts[chunk, stage] for stage in range(self.stages)) for chunk in range(self.chunks))

    def kinds(self, specs: Sequence[LayerSpec] | None = None) -> list[LayerKind]:
        """Return the kind of every layer, in order; ``specs`` are their specifications, None where all are alike."""
        if specs is None:
            return [layer.kind() for layer in self.layers]
        return [layer.kind(spec) for layer, spec in zip(self.layers, specs, strict=True)]

    def contradictions(self) -> list[tuple[str, str]]:
        """Return the patterns, with their select key, that are selected on some layer and excluded on some layer.

        MindFormers silently drops such a pattern from all layers.
        """
        return [(key, p) for key, exclude in EXCLUDES.items() for p in self.named(key) if p in self.named(exclude)]

    def named(self, key: str) -> list[str]:
        """Return all patterns under one key, sorted."""
        return sorted({pattern for layer in self.layers for pattern in layer.applied(key)})

    def at(self, chunk: int, stage: int) -> tuple[LayerAssignment, ...]:
        """Return the layers of one place, in order."""
        return tuple(layer for layer in self.layers if (layer.chunk, layer.stage) == (chunk, stage))


def make_plan(config: RunConfig) -> LayerPlan:
    """Read the plan of a configuration whose lists have been validated.

    Raises:
        UserError: an exclude list that has counts but no patterns, or repeats a selected pattern.
    """
    model, stages = config.model.config, config.parallel_config.pipeline_stage
    counts = layer_counts(model.layer_count, stages, model.pp_interleave_num, model.offset)
    return read_plan(counts, config.recompute_config, config.error, config.parallel.pipeline_config.v_shape)


def read_plan(
    counts: StageLayers, recompute: RecomputeConfig, error: Callable[[str, str], UserError], v_shape: bool = False
) -> LayerPlan:
    """The plan of these layers per ``[chunk][stage]`` and lists; ``error`` makes the UserError of a key and a message."""
    full = _spread(recompute.recompute, counts)
    selected = {key: _selection(recompute, key, counts, error) for key in DEFAULT_PATTERNS}
    plan = LayerPlan(len(counts[0]), len(counts), tuple(assignments(counts, full, selected, v_shape)), v_shape)
    for key, pattern in plan.contradictions():
        message = f"'{pattern}' is also in recompute_config.{key} (as written or by default); keep it in one of the two"
        raise error(f"recompute_config.{EXCLUDES[key]}", message)
    return plan


def assignments(
    counts: StageLayers,
    full: StageLayers,
    selected: Mapping[str, Mapping[str, StageLayers]],
    v_shape: bool = False,
) -> Iterator[LayerAssignment]:
    """Yield the layers of all places from numbers of first layers per ``[chunk][stage]``; ``selected`` by key and pattern."""
    for chunk, stage in places_in_order(len(counts[0]), len(counts), v_shape):
        for index in range(counts[chunk][stage]):
            full_layer = index < full[chunk][stage]
            patterns = {
                key: tuple(pattern for pattern, layers in by_pattern.items() if index < layers[chunk][stage])
                for key, by_pattern in selected.items()
                if not (full_layer and key in EXCLUDES)
            }
            yield LayerAssignment(stage, chunk, full_layer, patterns)


def _selection(
    recompute: RecomputeConfig, key: str, counts: StageLayers, error: Callable[[str, str], UserError]
) -> dict[str, StageLayers]:
    """Return the layers of each place that every pattern under ``key`` applies to."""
    value: LayerSelection = getattr(recompute, key)
    if isinstance(value, dict):
        return {pattern: _spread(counts_or_flag, counts) for pattern, counts_or_flag in value.items()}
    if isinstance(value, tuple) and isinstance(value[0], str):
        return {str(pattern): counts for pattern in value}
    counts_or_flag: LayerCounts = value  # type: ignore[assignment]
    spread = _spread(counts_or_flag, counts)
    if not DEFAULT_PATTERNS[key] and any(map(any, spread)):
        example = DEFAULT_PATTERNS["select_recompute"][0]
        raise error(f"recompute_config.{key}", f"has counts but no patterns; write '{example}': ... below it")
    return dict.fromkeys(DEFAULT_PATTERNS[key], spread)


def _spread(value: LayerCounts, counts: StageLayers) -> StageLayers:
    """Return ``value`` as the number of first layers of each ``[chunk][stage]``."""
    if isinstance(value, bool):
        return counts if value else tuple((0,) * len(row) for row in counts)
    rows = [row for row in value if isinstance(row, tuple)]
    if rows:
        return tuple(
            tuple(available if entry is True else int(entry) for entry, available in zip(row, available, strict=True))
            for row, available in zip(rows, counts, strict=True)
        )
    stages = zip([entry for entry in value if isinstance(entry, int)], zip(*counts, strict=True), strict=True)
    columns = [_round_robin(entry, available) for entry, available in stages]
    return tuple(zip(*columns, strict=True))


def _round_robin(value: bool | int, available: Sequence[int]) -> tuple[int, ...]:
    """Distribute a stage's count over its chunks, one layer each in turn while they have layers remaining."""
    total = sum(available) if value is True else int(value)
    turns = [(turn, chunk) for chunk, count in enumerate(available) for turn in range(count)]
    shares = Counter(chunk for _, chunk in sorted(turns)[:total])
    return tuple(shares[chunk] for chunk in range(len(available)))
