"""Where a difference begins: the step that differs first once more on both sides, every operator's value compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mindllm.compiled.execute.difference import first_difference
from mindllm.compiled.execute.records import Recorder
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.rank.compile_ranks import compile_ranks
from mindllm.config import RunConfig, override_config
from mindllm.parallel.layout import mesh_of
from mindllm.reduced_runs.model import single_device
from mindllm.verify.side import Reference, build_cluster, columns_read

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""By compute dtype, relative to the largest magnitude of a value."""
NOWHERE = (
    "every operator of the step computes what it does on a single device; what differs is what a rank keeps from one step to "
    "the next beside weights and optimizer state, or that a weight is not updated"
)

ONE_RANK = (
    "a gradient overflowed on one rank alone, and not all ranks were told of it: whether gradients are finite must be reduced "
    "over all ranks, as their norm is"
)


def one_device_graph(config: RunConfig, cache: Path | None = None) -> tuple[RunConfig, CompiledGraph]:
    """The same model compiled for one device of the accelerator: the operators of the cluster without its exchanges."""
    alone = override_config(single_device(config), {"context.device_target": "Ascend"})
    return alone, compile_ranks(alone, cache)[0]


def locate(
    config: RunConfig, graphs: list[CompiledGraph], reference: Reference, step: int, cache: Path | None = None
) -> str:
    """Describes the first operator that differs in step number ``step`` (from 0)."""
    alone, graph = one_device_graph(config, cache)
    task = reference.tasks[step]
    if task.spoiled is not None:
        return ONE_RANK
    state = reference.given(step)
    recorders = Recorder(), Recorder()
    for recorder, run, ranks in ((recorders[0], config, graphs), (recorders[1], alone, [graph])):
        cluster = build_cluster(run, ranks, state, observer=recorder)
        cluster.step(columns_read(run, task.batch), task.rate, task.scale)
    tolerance = TOLERANCES[config.model.config.compute_dtype]
    with np.errstate(all="ignore"):
        found = first_difference(recorders[0].records, recorders[1].records, graphs, mesh_of(config), tolerance)
    return found.describe() if found else NOWHERE
