"""Tables of rotary angles and masks that graphs hold as parameters, of which each stage has a copy of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindllm.compiled.graph import CompiledGraph
from mindllm.config import RunConfig


def tables(config: RunConfig, graphs: Sequence[CompiledGraph]) -> dict[str, np.ndarray]:
    """The tables of the graphs by the names of their parameters."""
    from mindllm.models.decoder import AttentionTables
    from mindllm.parallel.build import kernels_of

    made = AttentionTables(config.model.config, kernels_of(config)).parameters_dict()
    arrays = {name: np.asarray(parameter.asnumpy()) for name, parameter in made.items()}
    names = {name for graph in graphs for name in graph.parameters}
    return {name: arrays[last] for name in names if (last := name.rsplit(".", 1)[-1]) in arrays}
