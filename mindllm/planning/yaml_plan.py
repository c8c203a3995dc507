"""Plans as keys of a run YAML, and back. Keys are read back by the reader of runs before they are shown.

Manual plans are a YAML of names, each with the lists of a run:

    mine: {offset: [1, 0, 0, -1], recompute: [4, 2, 0, 0], select_recompute: false, select_comm_recompute: false}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindllm.architecture.layer_counts import IN_PIECES, ZERO_BUBBLE_V, layer_counts
from mindllm.config import RecomputeConfig
from mindllm.config.reading.yaml_tree import read_mapping
from mindllm.config.recompute import ATTENTION, SwapConfig
from mindllm.errors import UserError, nearest
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, LayerAssignment, LayerPlan, read_plan
from mindllm.parallel.plan_text import render_plan
from mindllm.planning.plan import Evaluation, Plan, evaluate
from mindllm.planning.problem import Problem, RecomputeKind

SELECTIONS = ("select_recompute", "select_comm_recompute")
KEYS = ("recompute", *SELECTIONS)
MANUAL_KEYS = (
    "offset",
    *KEYS,
    "interleave_num",
    "show",
    "file_name",
)  # the last two draw plans of SAPP, and are ignored


@dataclass(frozen=True)
class YamlPlan:
    """The lists of a plan, per stage or per chunk and stage.

    ``swap_config`` has the layers whose attention waits on the host; None if the plan does not choose that.
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
    """Return the keys of the schedule, if it is not 1F1B."""
    key = "parallel.pipeline_config.pipeline_scheduler"
    if problem.schedule in IN_PIECES:
        return {key: problem.schedule, "parallel_config.seq_split_num": problem.pieces}
    return {key: ZERO_BUBBLE_V} if problem.v_shape else {}


def write_plan(problem: Problem, plan: Plan) -> YamlPlan | None:
    """Return the lists of ``plan``; None if a recompute kind has no YAML form.

    Raises:
        UserError: no lists express the plan, or they read back as another plan.
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
    swap = _swap_config(kinds, [name for place in problem.visits for name in plan.places[place]])
    offset, full = rendered["model.model_config.offset"], rendered["recompute_config.recompute"]
    written = YamlPlan(offset, full, **lists, swap_config=swap)
    if read_yaml_plan(problem, written) != plan:
        raise UserError(f"{problem.name}: the lists of this plan read back as another plan: {written}")
    return written


def read_yaml_plan(problem: Problem, written: YamlPlan | Mapping[str, Any], source: str = "plan") -> Plan:
    """Return the plan of a run with these lists, in the recompute kinds of ``problem``."""
    fields = written if isinstance(written, Mapping) else vars(written)
    kinds = problem.yaml_kinds
    if kinds is None:
        raise UserError(f"{source}: recompute kinds {list(problem.kind_names)} have no YAML form; add recompute_kinds")

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
        how = (*_key(layer), swap.of_layer(number).get(ATTENTION, 0))
        if how not in named:
            text = "full" if layer.recompute else {key: list(value) for key, value in layer.patterns.items()} or "none"
            raise error(f"layer {number}", f"recomputation {text} is not one of the kinds {list(kinds)}")
        names.setdefault((layer.chunk, layer.stage), []).append(named[how])
    return Plan(tuple(tuple(names[place]) for place in sorted(names)))


def _swap_config(kinds: Mapping[str, RecomputeKind], names: Sequence[str]) -> dict[str, Any] | None:
    """Return ``swap_config`` for layers of these kinds in model order; None if no kind moves results."""
    if not any(kind.swap for kind in kinds.values()):
        return None
    layers: dict[int, list[int]] = {}
    for number, name in enumerate(names):
        if prefetch := kinds[name].swap:
            layers.setdefault(prefetch, []).append(number)
    op_swap = [
        {"op_name": [ATTENTION], "layers": numbers, "backward_prefetch": prefetch}
        for prefetch, numbers in layers.items()
    ]
    return {"swap": bool(op_swap), "layer_swap": None, "op_swap": op_swap or None}


def _check_shape(key: str, value: Any, problem: Problem, error: Any) -> None:
    """Raise ``error`` unless a list has one number per stage, or one such list per chunk."""
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
    """Return the recomputation of a layer, without its place."""
    return layer.recompute, tuple(layer.applied(key) for key in DEFAULT_PATTERNS)


def _patterns(key: str, value: bool | tuple[str, ...]) -> tuple[str, ...]:
    if value is True:
        return DEFAULT_PATTERNS[key]
    return value or ()


def _default_form(key: str, value: Any) -> Any:
    """Return plain counts if exactly the default patterns have equal counts, else the value."""
    if isinstance(value, dict) and set(value) == set(DEFAULT_PATTERNS[key]):
        counts = list(value.values())
        if all(count == counts[0] for count in counts):
            return counts[0]
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value


def evaluate_manual(problem: Problem, path: Path) -> dict[str, Evaluation]:
    """Simulate every manual plan of a file, and return the evaluations by name.

    Raises:
        UserError: the file is missing, or a key or list is invalid for ``problem``; names the plan and the key.
    """
    plans = read_mapping(path)
    if not plans:
        raise UserError(f"{path}: contains no plan")
    evaluations = {}
    for name, fields in plans.items():
        source = f"{path}: {name}"
        if not isinstance(fields, Mapping):
            raise UserError(f"{source}: must be a mapping with keys such as offset and recompute, not {fields!r}")
        for key in fields:
            if key not in MANUAL_KEYS:
                raise UserError(f"{source}: {key}: unknown key{nearest(str(key), MANUAL_KEYS)}")
        chunks = fields.get("interleave_num", problem.chunks)
        if not isinstance(chunks, int) or chunks < 1:
            raise UserError(f"{source}: interleave_num: must be a number of chunks (value {chunks!r})")
        if problem.v_shape and chunks != problem.chunks:
            raise UserError(f"{source}: interleave_num: a V has {problem.chunks} chunks (value {chunks})")
        chunked = problem.model_copy(update={"chunks": chunks})
        if chunked.layer_count < chunked.places:
            raise UserError(
                f"{source}: interleave_num: {chunked.layer_count} layers cannot fill {chunked.places} places"
            )
        evaluations[str(name)] = evaluate(chunked, read_yaml_plan(chunked, fields, source))
    return evaluations
