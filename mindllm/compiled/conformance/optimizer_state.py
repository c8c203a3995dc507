"""Whether weights and optimizer state are cut over the ranks that would otherwise hold copies of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mindllm.architecture.optimizer_state import MOMENT_PREFIXES, further_state
from mindllm.compiled.conformance.finding import Finding, Mistake, together
from mindllm.compiled.execute.state import ACCUMULATORS
from mindllm.compiled.graph.compiled_graph import Parameter
from mindllm.compiled.graph.operators import Operators
from mindllm.config import RunConfig
from mindllm.parallel.context import optimizer_level
from mindllm.parallel.layout import Mesh
from mindllm.parallel.parameter_layout import NOT_CUT, ParameterLayout
from mindllm.parallel.sharding.table import NOT_SPLIT
from mindllm.parallel.weight_cut import optimizer_shards

LEVELS = {"level1": "optimizer state", "level2": "optimizer state and accumulators", "level3": "weights, too"}


def optimizer_state(config: RunConfig, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """Every weight is in as many parts as the YAML asks for, its moments and, if asked for, its accumulator with it."""
    if mesh.stage_device_num == 1:
        return None
    mistakes, cut, asked = [], set(), set()
    for rank in ranks:
        parameters = rank.graph.parameters
        for name in (
            moment.removeprefix(MOMENT_PREFIXES[0]) for moment in parameters if moment.startswith(MOMENT_PREFIXES[0])
        ):
            weight = parameters.get(name)
            if weight is None or weight.layout is None or name.endswith(NOT_SPLIT):  # which is whole everywhere
                continue
            wanted, found = parts_asked_for(config, mesh, weight.layout), _parts(weight)
            asked |= {name} if wanted > 1 else set()
            cut |= {name} if found > 1 else set()
            if found != wanted:
                mistakes.append(Mistake(rank.graph.rank, f"{name} is in {found} parts over replicas, not {wanted}"))
            mistakes += [
                Mistake(rank.graph.rank, f"{other.name} has shape {list(other.shape)}, not {list(shape)}")
                for other, shape in _followers(config, weight, parameters)
                if other.shape != shape
            ]
    level = LEVELS[optimizer_level(config)] if config.parallel.enable_parallel_optimizer else ""
    return Finding(
        "optimizer parallel",
        f"{level}: {len(asked)} weights" if level else "no",
        f"{len(cut)} weights" if cut else "no",
        together(mistakes),
    )


def parts_asked_for(config: RunConfig, mesh: Mesh, layout: ParameterLayout) -> int:
    """Into how many parts the optimizer cuts dimension 0 of what tensor parallelism leaves of a weight."""
    cuts = math.prod(layout.device_matrix[-1 - axis] for axis in layout.tensor_map if axis != NOT_CUT)
    return optimizer_shards(config, mesh, layout.slice_shape, cuts)


def _parts(weight: Parameter) -> int:
    assert weight.layout is not None
    return weight.layout.slice_shape[0] // weight.shape[0] if weight.shape else 1


def _followers(
    config: RunConfig, weight: Parameter, parameters: Mapping[str, Parameter]
) -> list[tuple[Parameter, tuple[int, ...]]]:
    """Moments, and the accumulator, with the shapes they should have."""
    assert weight.layout is not None
    level = optimizer_level(config) if config.parallel.enable_parallel_optimizer else "level1"
    accumulated = weight.shape if level != "level1" else weight.layout.slice_shape
    projected = further_state(config.model.config.architecture)
    names = [f"{prefix}{weight.name}" for prefix in MOMENT_PREFIXES]
    wanted = {
        **{name: _moment_shape(weight, projected.get(name)) for name in names},
        f"{ACCUMULATORS}{weight.name}": accumulated,
    }
    return [(parameters[name], shape) for name, shape in wanted.items() if name in parameters]


def _moment_shape(weight: Parameter, projected: tuple[int, ...] | None) -> tuple[int, ...]:
    """That of the weight; of a ``projected`` moment the side that is the weight's is cut as the weight."""
    assert weight.layout is not None
    if projected is None:
        return weight.shape
    rows, columns = weight.layout.full_shape
    return (weight.shape[0], projected[1]) if rows >= columns else (projected[0], weight.shape[1])
