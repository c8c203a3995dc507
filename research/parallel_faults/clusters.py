"""Forms compiled and trained on one device, once for all mistakes that are planted into them; what the check says of one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindllm import verify
from mindllm.compiled.conformance import findings
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.rank.compile_ranks import compile_ranks
from mindllm.config import RunConfig, load_config
from mindllm.config.reading.overrides import Overrides
from mindllm.errors import CheckFailed, RunFailed
from mindllm.reduced_runs.model import reduce_model
from mindllm.verify.locate import locate, one_device_graph
from mindllm.verify.side import Reference, train_cluster, train_single

FORMS = Path(verify.__file__).parent / "forms"


@dataclass(frozen=True)
class Cluster:
    """A small configuration, the graphs of its ranks, what a single device computes, and the model compiled for one device."""

    config: RunConfig
    graphs: list[CompiledGraph]
    reference: Reference
    alone: tuple[RunConfig, CompiledGraph]


@dataclass(frozen=True)
class Answer:
    """What the check says: by what the mistake was found (nothing: it was not), where it begins, and how long that took."""

    found_by: str
    where: str
    seconds: float


def compiled_form(form: str, cache: Path, overrides: Overrides = (), steps: int = 2) -> Cluster:
    """The cluster of one of the forms."""
    config = reduce_model(load_config(FORMS / f"{form}.yaml", overrides))
    graphs = compile_ranks(config, cache)
    return Cluster(config, graphs, train_single(config, steps), one_device_graph(config, cache))


def answer(cluster: Cluster, graphs: Sequence[CompiledGraph]) -> Answer:
    """What the check says of graphs."""
    begun = time.process_time()
    found, where = _answer(cluster, list(graphs))
    return Answer(found, where, time.process_time() - begun)


def _answer(cluster: Cluster, graphs: list[CompiledGraph]) -> tuple[str, str]:
    config, reference = cluster.config, cluster.reference
    try:
        comparisons = train_cluster(config, graphs, reference)
    except (CheckFailed, RunFailed) as error:
        return type(error).__name__, f"{error}"
    for step, comparison in enumerate(comparisons):
        if problems := comparison.problems():
            return _kind(problems[0]), locate(config, graphs, reference, step, alone=cluster.alone)
    broken = [finding.what for finding in findings(config, graphs) if not finding.holds]
    return (f"asked for: {broken[0]}", broken[0]) if broken else ("", "")


def _kind(problem: str) -> str:
    known = ("loss", "global norm", "overflow", "tokens", "weight decay")
    return next((name for name in known if problem.startswith(name)), "weights or moments")
