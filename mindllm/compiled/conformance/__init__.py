"""Whether what a YAML asks for is in the compiled graphs of its ranks, where no number that is computed would tell.

A layer that is not recomputed, an optimizer state that is not sharded, a chunk on another stage: losses and gradients are
the same, memory and time are not. ``findings`` compares each such thing with the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.compiled.conformance.communication import gradient_fusion, sequences
from mindllm.compiled.conformance.dtypes import dtypes
from mindllm.compiled.conformance.expected import asked_dtypes, asked_plan
from mindllm.compiled.conformance.finding import Finding
from mindllm.compiled.conformance.order import order
from mindllm.compiled.conformance.placement import chunks, micro_batches, planned, stages
from mindllm.compiled.conformance.recomputation import recomputation, swaps
from mindllm.compiled.conformance.shardings import optimizer_state, shardings
from mindllm.compiled.conformance.sizes import sizes
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.operators import Operators
from mindllm.config import RunConfig
from mindllm.parallel.layout import mesh_of

__all__ = ["Finding", "findings", "planned"]


def findings(config: RunConfig, graphs: Sequence[CompiledGraph]) -> tuple[Finding, ...]:
    """Compare the properties that ``config`` gives the graphs with ``graphs``, those of all or some of its ranks."""
    plan, mesh = asked_plan(config), mesh_of(config)
    ranks = [Operators(graph) for graph in graphs]
    found = (
        stages(config, plan, mesh, ranks),
        chunks(plan, mesh, ranks),
        micro_batches(config, ranks),
        recomputation(config, plan, ranks),
        optimizer_state(config, mesh, ranks),
        gradient_fusion(config, ranks),
        shardings(config, mesh, ranks),
        sequences(config, mesh, ranks),
        sizes(config, ranks),
        swaps(config, ranks),
        order(config, ranks),
        dtypes(config, ranks) if asked_dtypes(config).is_narrow else None,
    )
    return tuple(finding for finding in found if finding is not None)
