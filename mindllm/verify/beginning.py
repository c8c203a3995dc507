"""Whether each rank would begin a run with its parts of the weights that a single device begins with.

The steps that are compared begin elsewhere, with weights that hide nothing. How a weight begins is what the rank's own program
says of it; its part is cut by the rank's own layout, as ``mindllm/train/engine/cluster_rank.py`` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import updated_weights
from mindllm.compiled.execute.state import slices_of, whole_shape
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.initial import CONSTANT
from mindllm.models.weights import drawn_value

Drawn = Callable[[str, tuple[int, ...], tuple[Any, ...]], np.ndarray]


def beginning_problems(graphs: Sequence[CompiledGraph], seed: int, begins: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield each weight with which some rank begins otherwise, once.

    Args:
        graphs: of the ranks.
        seed: of the run.
        begins: weights of a single device when a run begins, by name.
    """
    drawn, told = _drawing(seed), set()
    for graph in graphs:
        updated = set(updated_weights(graph.parameters))
        for name, parameter in graph.parameters.items():
            if name not in begins or name in told:
                continue
            if parameter.begins is None:
                problem = "nothing says how it begins" if name in updated else ""
            else:
                where = slices_of(parameter, graph.rank)
                problem = _problem(drawn(name, whole_shape(parameter), parameter.begins)[where], begins[name][where])
            if problem:
                told.add(name)
                yield f"{name} on rank {graph.rank}, before the first step: {problem}"


def _drawing(seed: int) -> Drawn:
    @cache
    def drawn(name: str, shape: tuple[int, ...], begins: tuple[Any, ...]) -> np.ndarray:
        kind, value = begins
        if kind == CONSTANT:
            return np.full(shape, value, np.float32)
        found = drawn_value(name, shape, SimpleNamespace(**{kind: value}), seed)
        assert found is not None
        return found

    return drawn


def _problem(found: np.ndarray, wanted: np.ndarray) -> str:
    if found.shape != wanted.shape:
        return f"{list(found.shape)} in place of {list(wanted.shape)}"
    error = float(np.max(np.abs(found.astype(wanted.dtype) - wanted), initial=0.0))
    return f"off by {error:.2e}" if error else ""
