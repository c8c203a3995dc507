"""A cluster that evaluates: the forward graphs of all its ranks, with the weights that training has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindllm.compiled.execute.cluster import Cluster, rows_of
from mindllm.compiled.execute.lockstep import Lockstep
from mindllm.compiled.execute.rank_interpreter import RankInterpreter
from mindllm.compiled.execute.state import initial_parts, put_parts
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.errors import RunFailed


class LossCluster:
    """Ranks in one process that compute losses; arguments as those of :class:`Cluster`."""

    def __init__(self, graphs: Sequence[CompiledGraph], stages: int, slices: int, whole: Mapping[str, Any]) -> None:
        self.stage_devices = len(graphs) // stages
        self.slices = slices
        self.machines = [RankInterpreter(graph, initial_parts(graph, whole)) for graph in graphs]

    def take_weights(self, cluster: Cluster) -> None:
        """Goes on with the weights that a training cluster of the same layout has now.

        Raises:
            RunFailed: the compiler has cut a weight otherwise for training.
        """
        for own, training in zip(self.machines, cluster.machines, strict=True):
            for name, parameter in own.parameters.items():
                if name not in training.parameters:
                    continue
                value = training.parameters[name].value
                if value.shape != parameter.value.shape:
                    raise RunFailed(
                        f"rank {own.rank}: {name} is {list(parameter.value.shape)} in the graph that evaluates and "
                        f"{list(value.shape)} in the one that trains"
                    )
                parameter.value = value

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Replaces every rank's parts of these whole tensors."""
        for machine in self.machines:
            put_parts(machine, arrays)

    def evaluate(self, batch: Mapping[str, np.ndarray]) -> tuple[float, int]:
        """Summed loss in nats and number of tokens of a batch ``[batch, seq]``.

        Raises:
            Deadlock: ranks that wait for each other.
        """
        inputs = {
            machine.rank: rows_of(batch, machine.rank, self.stage_devices, self.slices) for machine in self.machines
        }
        outputs = Lockstep(self.machines, inputs).run()
        return float(outputs[self.machines[-1].rank]), int(batch["loss_mask"].sum())
