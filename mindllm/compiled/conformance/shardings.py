"""Whether every operator is sharded as declared: data, tensor and sequence parallelism as the compiler was given them.

And whether weights and optimizer state are cut over the ranks that would otherwise hold copies of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mindllm.architecture.optimizer_state import CODES, MOMENT_PREFIXES, MUON_MOMENT, further_state, updated_weights
from mindllm.compiled.conformance.expected import gathers_again, shards_accumulators
from mindllm.compiled.conformance.finding import Finding, Mistake, together
from mindllm.compiled.execute.state import ACCUMULATORS
from mindllm.compiled.graph.compiled_graph import Parameter
from mindllm.compiled.graph.operators import FORWARD, REFERENCE, Operators
from mindllm.config import RunConfig
from mindllm.parallel.layout import Mesh
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.parallel.sharding.table import NOT_SPLIT
from mindllm.parallel.weight_cut import optimizer_shards

Strategies = tuple[tuple[int, ...], ...]
SHARE_NAMES = frozenset({"ReduceSum", "Sub"})
"""Operators whose names the compiler mixes up with those of others of their kind in the same cell (MindSpore 2.10)."""
OF_STATE, OF_ACCUMULATORS, OF_WEIGHTS = "optimizer state", "optimizer state and accumulators", "weights, too"


def shardings(config: RunConfig, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """Compare the strategies in the graphs with those of the table, by the operator's path."""
    if mesh.stage_device_num == 1:
        return None
    declared = _Declared(config, mesh)
    mistakes, count = [], 0
    for rank in ranks:
        for node in rank.nodes:
            if node.input_strategy is None or rank.phase(node) != FORWARD:
                continue
            path = ".".join(filter(None, (rank.place(node), node.instance)))
            expected = declared.of(path, node.op)
            if not expected:
                continue
            count += 1
            if node.input_strategy not in expected:
                text = f"{path} is sharded {node.input_strategy}, not {' or '.join(map(str, sorted(expected)))}"
                mistakes.append(Mistake(rank.graph.rank, text))
    words = [f"{axis}{size}" for axis, size in mesh.axes.items() if size > 1]
    words += ["sequence parallel"] * config.parallel_config.use_seq_parallel
    wrong = len(mistakes)
    found = f"{count - wrong} of {count} operators" if wrong else f"all {count} operators"
    return Finding("shardings", " ".join(words), found, together(mistakes))


class _Declared:
    """Strategies of the sharding table."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        from mindllm.finetune.preference import make_losses
        from mindllm.finetune.transform import tune
        from mindllm.models import CausalLM
        from mindllm.parallel.build import kernels_of
        from mindllm.parallel.operators import operators
        from mindllm.parallel.sharding import sharding_table
        from mindllm.parallel.sharding.preference import pairs_table

        self.mesh = mesh
        model, kernels = config.model.config, kernels_of(config)
        lm = CausalLM(model, kernels)
        tune(lm, model, kernels)
        self.kinds = {path: operator.name for path, operator in operators(lm).items()}
        self.table = sharding_table(lm, config.parallel_config)
        if config.is_preference_tuning:
            pairs = make_losses(config.preference, model.seq_length)
            self.kinds |= {f"pairs.{path}": operator.name for path, operator in operators(pairs).items()}
            self.table |= {f"pairs.{path}": sharding for path, sharding in pairs_table(pairs).items()}

    def of(self, path: str, kind: str) -> frozenset[Strategies]:
        """Return the strategies that an operator of this kind may have; empty if the table does not name it.

        Those of a reference are those of the model beside it.
        """
        path = path.removeprefix(REFERENCE)
        if path not in self.table:
            return frozenset()
        paths = self._siblings(path) if kind in SHARE_NAMES else [path]
        return frozenset(
            tuple(self.mesh.strategy(layout) for layout in self.table[sibling].inputs) for sibling in paths
        )

    def _siblings(self, path: str) -> list[str]:
        """Return the operators of the same kind in the same cell, including itself."""
        cell, kind = path.rpartition(".")[0], self.kinds[path]
        return [other for other in self.table if other.rpartition(".")[0] == cell and self.kinds.get(other) == kind]


def optimizer_state(config: RunConfig, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """Every weight is in as many parts as the YAML asks for, its moments and, if asked for, its accumulator with it."""
    if mesh.stage_device_num == 1:
        return None
    mistakes, cut, asked = [], set(), set()
    for rank in ranks:
        parameters = rank.graph.parameters
        for name in updated_weights(parameters):
            weight = parameters.get(name)
            if weight is None or weight.layout is None or name.endswith(NOT_SPLIT):  # which is whole everywhere
                continue
            expected, found = parts_asked_for(config, mesh, weight.layout), _parts(weight)
            asked |= {name} if expected > 1 else set()
            cut |= {name} if found > 1 else set()
            if found != expected:
                mistakes.append(Mistake(rank.graph.rank, f"{name} is in {found} parts over replicas, not {expected}"))
            mistakes += [
                Mistake(rank.graph.rank, f"{other.name} has shape {list(other.shape)}, not {list(shape)}")
                for other, shape in _followers(config, weight, parameters)
                if other.shape != shape
            ]
    level = _what_is_cut(config)
    return Finding(
        "optimizer parallel",
        f"{level}: {len(asked)} weights" if level else "no",
        f"{len(cut)} weights" if cut else "no",
        together(mistakes),
    )


def _what_is_cut(config: RunConfig) -> str:
    if not config.parallel.enable_parallel_optimizer:
        return ""
    if gathers_again(config):
        return OF_WEIGHTS
    return OF_ACCUMULATORS if shards_accumulators(config) else OF_STATE


def parts_asked_for(config: RunConfig, mesh: Mesh, layout: ParameterLayout) -> int:
    """Into how many parts the optimizer cuts dimension 0 of what tensor parallelism leaves of a weight."""
    cuts = math.prod(map(layout.cuts, layout.axes))
    return optimizer_shards(config, mesh, layout.slice_shape, cuts)


def _parts(weight: Parameter) -> int:
    assert weight.layout is not None
    return weight.layout.slice_shape[0] // weight.shape[0] if weight.shape else 1


def _followers(
    config: RunConfig, weight: Parameter, parameters: Mapping[str, Parameter]
) -> list[tuple[Parameter, tuple[int, ...]]]:
    """Moments, and the accumulator, with the shapes they should have."""
    assert weight.layout is not None
    accumulated = weight.shape if shards_accumulators(config) else weight.layout.slice_shape
    projected = further_state(config.model.config.architecture)
    names = [
        f"{prefix}{weight.name}" for prefix in (*MOMENT_PREFIXES, f"{MUON_MOMENT}.", *(f"{kind}." for kind in CODES))
    ]
    expected = {
        **{name: _moment_shape(weight, projected.get(name)) for name in names},
        f"{ACCUMULATORS}{weight.name}": accumulated,
    }
    return [(parameters[name], shape) for name, shape in expected.items() if name in parameters]


def _moment_shape(weight: Parameter, projected: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of a moment. A ``projected`` one is cut like the weight on the side that it shares with it."""
    assert weight.layout is not None
    if projected is None:
        return weight.shape
    rows, columns = weight.layout.full_shape
    return (weight.shape[0], projected[1]) if rows >= columns else (projected[0], weight.shape[1])
