"""A plan as the keys of a run YAML, and back: what is written is read by the reader of runs before it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mindllm.architecture.layer_counts import IN_PIECES, ZERO_BUBBLE_V, layer_counts
from mindllm.config import RecomputeConfig
from mindllm.config.swap import ATTENTION, SwapConfig
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, LayerAssignment, LayerPlan, read_plan
from mindllm.parallel.plan_text import render_plan
from mindllm.planning.plan import Plan
from mindllm.planning.problem import Problem, RecomputeKind

SELECTIONS = ("select_recompute", "select_comm_recompute")
KEYS = ("recompute", *SELECTIONS)


@dataclass(frozen=True)
class YamlPlan:
    """The four values, lists per stage or per chunk and stage.

    And which layers' attention waits on the host, as ``swap_config`` says it; None where a plan does not choose that.
    """

    offset: Any
    recompute: Any
    select_recompute: Any
    select_comm_recompute: Any
    swap_config: dict[str, Any] | None = None

    def overrides(self, problem: Problem) -> dict[str, Any]:
        """Return the keys of a run YAML by dotted name, with those of the pipeline."""
        return {
            "model.model_config.offset": self.offset,
            "model.model_config.pp_interleave_num": problem.chunks,
            "parallel_config.pipeline_stage": problem.stages,
            "parallel_config.micro_batch_num": problem.micro_batches,
            "parallel.pipeline_config.pipeline_interleave": problem.chunks > 1 or problem.schedule in IN_PIECES,
            **_scheduler(problem),
            **{f"recompute_config.{key}": getattr(self, key) for key in KEYS},
            **{f"swap_config.{key}": value for key, value in (self.swap_config or {}).items()},
        }


def _scheduler(problem: Problem) -> dict[str, Any]:
    """The keys of an order that places, memory or passes of the plan ask for."""
    key = "parallel.pipeline_config.pipeline_scheduler"
    if problem.schedule in IN_PIECES:
        return {key: problem.schedule, "parallel_config.seq_split_num": problem.pieces}
    return {key: ZERO_BUBBLE_V} if problem.v_shape else {}


def write_plan(problem: Problem, plan: Plan) -> YamlPlan | None:
    """The lists that say ``plan``; None for kinds of recomputation that have no YAML form.

    Raises:
        UserError: a mix that no lists say, or lists that read back as another plan.
    """
    kinds = problem.yaml_kinds
    if kinds is None:
        return None
    layers = [
        _assignment(place % problem.stages, place // problem.stages, kinds[name])
        for place in problem.visits
        for name in plan.places[place]
    ]
    rendered = render_plan(LayerPlan(problem.stages, problem.chunks, tuple(layers), problem.v_shape))
    lists = {key: _default_form(key, rendered[f"recompute_config.{key}"]) for key in SELECTIONS}
    moved = _swapped(kinds, [name for place in problem.visits for name in plan.places[place]])
    offset, full = rendered["model.model_config.offset"], rendered["recompute_config.recompute"]
    written = YamlPlan(offset, full, **lists, swap_config=moved)
    if read_yaml_plan(problem, written) != plan:
        raise UserError(f"{problem.name}: the lists of this plan read back as another plan: {written}")
    return written


def read_yaml_plan(problem: Problem, written: YamlPlan | Mapping[str, Any], source: str = "plan") -> Plan:
    """The plan that a run with these values has, in the recompute kinds of ``problem``."""
    fields = written if isinstance(written, Mapping) else vars(written)
    kinds = problem.yaml_kinds
    if kinds is None:
        raise UserError(f"{source}: recompute kinds {list(problem.kind_names)} have no YAML form; give recompute_kinds")

    def error(key: str, message: str) -> UserError:
        return UserError(f"{source}: {key.removeprefix('recompute_config.')}: {message}")

    try:
        counts = layer_counts(problem.layer_count, problem.stages, problem.chunks, _tuples(fields.get("offset", 0)))
    except (ValueError, TypeError) as wrong:
        raise error("offset", str(wrong)) from None
    lists = {}
    for key in KEYS:
        lists[key] = fields.get(key, False)
        _check_shape(key, lists[key], problem, error)
    try:
        recompute = RecomputeConfig.model_validate(lists)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        raise error(str(first["loc"][0]), first["msg"]) from None
    read = read_plan(counts, recompute, error, problem.v_shape)
    named = {(*_key(_assignment(0, 0, kind)), kind.swap): name for name, kind in reversed(list(kinds.items()))}
    swap = SwapConfig.model_validate(fields.get("swap_config") or {})
    names: dict[tuple[int, int], list[str]] = {}
    for number, layer in enumerate(read.layers):
        bare = (*_key(layer), swap.of_layer(number).get(ATTENTION, 0))
        if bare not in named:
            what = "full" if layer.recompute else {key: list(found) for key, found in layer.patterns.items()} or "none"
            raise error(f"layer {number}", f"recomputation {what} is none of the kinds {list(kinds)}")
        names.setdefault((layer.chunk, layer.stage), []).append(named[bare])
    return Plan(tuple(tuple(names[place]) for place in sorted(names)))


def _swapped(kinds: Mapping[str, RecomputeKind], names: Sequence[str]) -> dict[str, Any] | None:
    """What ``swap_config`` says of layers of these kinds, in model order; None where no kind moves anything."""
    if not any(kind.swap for kind in kinds.values()):
        return None
    layers: dict[int, list[int]] = {}
    for number, name in enumerate(names):
        if ahead := kinds[name].swap:
            layers.setdefault(ahead, []).append(number)
    moved = [{"op_name": [ATTENTION], "layers": held, "backward_prefetch": ahead} for ahead, held in layers.items()]
    return {"swap": bool(moved), "layer_swap": None, "op_swap": moved or None}


def _check_shape(key: str, value: Any, problem: Problem, error: Any) -> None:
    """Raises where a list is not one for each stage, or one such list for each chunk."""
    rows: Sequence[Any] = value if isinstance(value, list | tuple) else []
    nested: list[Sequence[Any]] = [row for row in rows if isinstance(row, list | tuple)]
    if nested and len(nested) != problem.chunks:
        raise error(key, f"has {len(nested)} lists for {problem.chunks} chunk(s)")
    for row in nested or ([rows] if rows and not isinstance(rows[0], str) else []):
        if len(row) != problem.stages:
            raise error(key, f"has {len(row)} numbers for {problem.stages} stages")


def _assignment(stage: int, chunk: int, kind: RecomputeKind) -> LayerAssignment:
    patterns = {} if kind.recompute else {key: _patterns(key, getattr(kind, key)) for key in SELECTIONS}
    return LayerAssignment(stage, chunk, kind.recompute, patterns)


def _key(layer: LayerAssignment) -> tuple[Any, ...]:
    """What of a layer is recomputed, wherever it is."""
    return layer.recompute, tuple(layer.applied(key) for key in DEFAULT_PATTERNS)


def _patterns(key: str, value: bool | tuple[str, ...]) -> tuple[str, ...]:
    if value is True:
        return DEFAULT_PATTERNS[key]
    return value or ()


def _default_form(key: str, value: Any) -> Any:
    """Plain counts where all the default patterns, and no others, have the same."""
    if isinstance(value, dict) and set(value) == set(DEFAULT_PATTERNS[key]):
        counts = list(value.values())
        if all(count == counts[0] for count in counts):
            return counts[0]
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value
