"""The different layers of a model that is planned, by the names that its problem and its small runs have for them.

And the ways to recompute them that a run can choose between: none, its selections of operators, of communication, both, and full.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, EXCLUDES, make_plan
from mindllm.planning.problem import STANDARD_KINDS, RecomputeKind

LAYER = "layer"
SELECT, COMMUNICATION = EXCLUDES


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


def check_planned(config: RunConfig, swap: bool = False) -> None:
    """Refuses runs that the planner has nothing to say of: without a pipeline, or with results that wait on the host.

    The latter is for plans that choose it (``swap``). And those with layers as :func:`check_ahead` says.

    Raises:
        UserError: names the key.
    """
    stages = config.parallel_config.pipeline_stage
    if stages < 2:
        message = f"is {stages}: there is no pipeline to plan; write a number of stages from 2 on"
        raise config.error("parallel_config.pipeline_stage", message)
    if config.swap_config.swap and not swap:
        message = (
            "a plan chooses recomputation, not what waits on the host (value true); write false, or --formula --swap"
        )
        raise config.error("swap_config.swap", message)
    check_ahead(config)


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


def offered_kinds(config: RunConfig) -> dict[str, RecomputeKind]:
    """Kinds by name. Selections are those the YAML names, or the default ones where it names none.

    Communication inside layers is there to recompute only where ranks share a layer, so ``comm`` and ``both`` are offered with
    tensor parallelism, or where the YAML asks for them.

    Raises:
        UserError: the run excludes operators from recomputation, which plans do not.
    """
    plan = make_plan(config)
    for key in EXCLUDES.values():
        if plan.named(key):
            raise config.error(f"recompute_config.{key}", "a plan has no excluded operators; leave it out")
    sets = sorted({found for layer in plan.layers if (found := layer.applied(SELECT))}, key=lambda found: -len(found))
    selections = [_written(SELECT, found) for found in sets] or [True]
    exchanged = tuple(plan.named(COMMUNICATION))
    kinds = {"none": STANDARD_KINDS["none"]}
    names = ["select", *(f"select {number}" for number in range(2, len(selections) + 1))]
    kinds |= {
        name: RecomputeKind(select_recompute=chosen) for name, chosen in zip(names, selections, strict=True)
    }  # fmt: skip
    if config.parallel_config.model_parallel > 1 or exchanged:
        comm = _written(COMMUNICATION, exchanged) if exchanged else True
        kinds["comm"] = RecomputeKind(select_comm_recompute=comm)
        kinds["both"] = RecomputeKind(select_recompute=selections[0], select_comm_recompute=comm)
    return {**kinds, "full": STANDARD_KINDS["full"]}


def recomputed(layer: LayerKind, how: RecomputeKind) -> LayerKind:
    """Return the kind of such a layer when it is recomputed in this way."""
    chosen = {key: getattr(how, key) for key in (SELECT, COMMUNICATION)}
    patterns = {key: DEFAULT_PATTERNS[key] if value is True else value for key, value in chosen.items() if value}
    written = tuple(sorted((key, tuple(sorted(found))) for key, found in patterns.items()))
    return replace(layer, recompute=how.recompute, patterns=written)


def chains(kinds: dict[str, RecomputeKind]) -> list[list[str]]:
    """Kinds shared out over rows in which each holds the next, so that the layers of one place can have them all."""
    rows: list[list[str]] = []
    for name in sorted(kinds, key=lambda name: (not kinds[name].recompute, -len(kinds[name].marks))):
        row = next((row for row in rows if kinds[row[-1]].holds(kinds[name])), None)
        if row is None:
            rows.append([name])
        else:
            row.append(name)
    return rows


def _written(key: str, patterns: tuple[str, ...]) -> bool | tuple[str, ...]:
    """``True`` for the default patterns."""
    return True if set(patterns) == set(DEFAULT_PATTERNS[key]) else patterns
