"""Candidates judged by the nodes of a Ray cluster, some hundreds by each piece of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindllm.config import RunConfig, load_config, tree_of
from mindllm.executor.ray_cluster import Spread, Work
from mindllm.strategies.candidates import Candidate, read_candidate
from mindllm.strategies.constraints import Constraints
from mindllm.strategies.judge import Judged, judge, read_judged
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device

TOGETHER = 200  # candidates of a piece: what they take should be more than starting a process
FUNCTION = f"{__name__}:judge_some"


def spread_judgements(
    config: RunConfig, wanted: Sequence[Candidate], device: Device, limit: float, constraints: Constraints
) -> Iterator[tuple[Candidate, Judged | None]]:
    """Yield candidates with what the cluster says of them, as it comes."""
    tree, described = tree_of(config), device.model_dump(mode="json")
    groups = [wanted[first : first + TOGETHER] for first in range(0, len(wanted), TOGETHER)]
    spread = Spread(
        [
            Work(
                FUNCTION,
                (tree, [one.tree() for one in group], described, limit, constraints.tree()),
                f"judging {group[0].name} and others",
            )
            for group in groups
        ]
    )
    try:
        for place, trees in spread.done(None):
            for one, judged in zip(groups[place], trees, strict=True):
                yield one, read_judged(judged) if judged else None
    finally:
        spread.kill()


def judge_some(
    tree: dict[str, Any],
    candidates: Sequence[dict[str, Any]],
    device: dict[str, Any],
    limit: float,
    constraints: dict[str, Any],
) -> list[dict[str, Any] | None]:
    """Judge candidates on a node; None for those that do not fit."""
    config, known = load_config(tree), Device.model_validate(device)
    base, wanted = workload_of(config), Constraints(**constraints)
    found = [judge(config, base, read_candidate(one), known, limit, wanted) for one in candidates]
    return [one.tree() if one else None for one in found]
