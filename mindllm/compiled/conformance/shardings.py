"""Whether every operator is sharded as declared: data, tensor and sequence parallelism as the compiler was given them."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.compiled.conformance.finding import Finding, Mistake, together
from mindllm.compiled.graph.operators import FORWARD, REFERENCE, Operators
from mindllm.config import RunConfig
from mindllm.parallel.layout import Mesh

Strategies = tuple[tuple[int, ...], ...]
SHARE_NAMES = frozenset({"ReduceSum", "Sub"})
"""Operators whose names the compiler mixes up with those of others of their kind in the same cell (MindSpore 2.10)."""


def shardings(config: RunConfig, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """The strategies of the graphs against those of the table, by the operator's path."""
    if mesh.stage_device_num == 1:
        return None
    declared = _Declared(config, mesh)
    mistakes, count = [], 0
    for rank in ranks:
        for node in rank.nodes:
            if node.input_strategy is None or rank.phase(node) != FORWARD:
                continue
            path = ".".join(filter(None, (rank.place(node), node.instance)))
            wanted = declared.of(path, node.op)
            if not wanted:
                continue
            count += 1
            if node.input_strategy not in wanted:
                text = f"{path} is sharded {node.input_strategy}, not {' or '.join(map(str, sorted(wanted)))}"
                mistakes.append(Mistake(rank.graph.rank, text))
    words = [f"{axis}{size}" for axis, size in mesh.axes.items() if size > 1]
    words += ["sequence parallel"] * config.parallel_config.use_seq_parallel
    wrong = len(mistakes)
    found = f"{count - wrong} of {count} operators" if wrong else f"all {count} operators"
    return Finding("shardings", " ".join(words), found, together(mistakes))


class _Declared:
    """Strategies of the sharding table."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        from mindllm.finetune.preference import PairLosses
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
            pairs = PairLosses(config.preference)
            self.kinds |= {f"pairs.{path}": operator.name for path, operator in operators(pairs).items()}
            self.table |= {f"pairs.{path}": sharding for path, sharding in pairs_table(pairs).items()}

    def of(self, path: str, kind: str) -> frozenset[Strategies]:
        """The strategies an operator of this kind may have; empty for one that the table does not name.

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
        """The operators of the same kind in the same cell, itself among them."""
        cell, kind = path.rpartition(".")[0], self.kinds[path]
        return [other for other in self.table if other.rpartition(".")[0] == cell and self.kinds.get(other) == kind]
