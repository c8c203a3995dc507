"""Tables that ranks keep beside their weights (angles of the rotary embedding, masks) against those of a single device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mindllm.compiled.execute.state import slices_of, whole_shape
from mindllm.compiled.graph.compiled_graph import CompiledGraph

ROUNDING = 1e-6
TABLES = "tables."


def below_tables(name: str) -> str:
    """``contexts.0.rotary_cos`` of ``model.tables.1.contexts.0.rotary_cos``, and of the same without a stage's number."""
    inside = name.rpartition(TABLES)[2]
    stage, dot, rest = inside.partition(".")
    return rest if dot and stage.isdecimal() else inside


def table_problems(
    graphs: Sequence[CompiledGraph], tables: Mapping[str, np.ndarray], positions: np.ndarray
) -> Iterator[str]:
    """Tables of each rank that are not those of the single device, by their names below those of a stage's tables.

    ``positions``: of the tokens of a sequence as they stand on the ranks. Of a table that ranks of a sequence share, each rank's
    part is compared. One that has another shape or dtype there, such as the
    mask of a fused attention, is seen only where it is used.
    """
    for graph in graphs:
        for parameter in graph.parameters.values():
            found, wanted = parameter.initial, tables.get(below_tables(parameter.name))
            if found is None or wanted is None:
                continue
            if found.shape == parameter.shape and wanted.shape == whole_shape(parameter):
                ordered = wanted[positions] if len(wanted) == len(positions) else wanted
                wanted = ordered[slices_of(parameter, graph.rank)]
            if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
                continue
            error = float(np.max(np.abs(np.subtract(found, wanted, dtype=np.float64)), initial=0.0))
            if not error <= ROUNDING:
                yield f"{parameter.name} on rank {graph.rank}: off by {error:.2e} from the table of a single device"
