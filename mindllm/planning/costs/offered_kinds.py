"""The recompute kinds a run can choose between: none, its selections of operators, of communication, both, and full."""

from __future__ import annotations

from dataclasses import replace

from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, EXCLUDES, make_plan
from mindllm.planning.problem import STANDARD_KINDS, RecomputeKind

SELECT, COMMUNICATION = EXCLUDES


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
