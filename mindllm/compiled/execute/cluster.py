"""A cluster that trains: the graphs of all its ranks with their parameters, one optimizer step at a time.

A fault is what goes wrong on one rank alone: a gradient that overflows there, of which the other ranks must be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import MOMENT_PREFIXES, is_state
from mindllm.compiled.execute.lockstep import Lockstep
from mindllm.compiled.execute.rank_interpreter import Observer, RankInterpreter
from mindllm.compiled.execute.state import initial_parts, put_parts, state_parts
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.errors import RunFailed
from mindllm.train.checkpoint.parts import RankTensors
from mindllm.train.expert_loads import LOAD
from mindllm.train.watched import max_logits_by_layer

PRODUCTS = ("MatMul", "BatchMatMul")
TRANSPOSED = 2  # operand of a product that says whether its first factor is transposed
STEP_OUTPUTS = 4  # loss, norm, whether all is finite, tokens


class Overflow:
    """Makes one element of the first weight gradient that a rank computes infinite.

    No other gradient is computed from it: ranks that do not share the weight learn of it through the global norm alone.
    ``scope`` says where it was; empty until then.
    """

    def __init__(self, graph: CompiledGraph | None) -> None:
        self.graph = graph
        self.scope = ""

    def __call__(self, node: Node, result: Any) -> Any:
        if self.graph is None or self.scope or not is_weight_gradient(self.graph, node):
            return result
        self.scope = f"{node.op} on rank {self.graph.rank} at {node.scope}"
        spoiled = np.array(result)
        spoiled.reshape(-1)[0] = np.inf
        return spoiled


def is_weight_gradient(graph: CompiledGraph, node: Node) -> bool:
    """Return True if a node is the product of transposed gradients with a layer's input.

    No product of a model transposes its first factor. Where the node stands does not tell: the compiler joins those of several
    copies of a layer into one of its own, outside of the backward pass.
    """
    if node.op not in PRODUCTS or len(node.inputs) <= TRANSPOSED:
        return False
    return graph.constants.get(node.inputs[TRANSPOSED]) is True


@contextmanager
def overflowing(machines: Sequence[RankInterpreter], index: int | None) -> Iterator[Overflow]:
    """A gradient of one of the machines overflows inside; None: of no machine.

    Raises:
        RunFailed: the machine ended its step and computed no gradient of a weight.
    """
    if index is None:
        yield Overflow(None)
        return
    machine = machines[index]
    machine.fault = fault = Overflow(machine.graph)
    try:
        yield fault
    finally:
        machine.fault = None
    if not fault.scope:
        raise RunFailed(f"rank {machine.rank} computes no gradient of a weight: an overflow there cannot be made")


@dataclass(frozen=True)
class ClusterStep:
    """What a step computed: the mean loss per token of the last stage, and what every rank says of the whole.

    ``norms``, ``overflows`` and ``tokens`` have one entry per rank; they must be equal. ``spoiled`` says which gradient was
    made infinite, and on which rank.
    """

    loss: float
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    overflows: tuple[bool, ...]
    tokens: tuple[int, ...]
    spoiled: str = ""


class Cluster:
    """Ranks in one process.

    Args:
        graphs: of all ranks, in order.
        stages: pipeline stages.
        slices: parts the batch is given in; 1 where every rank is given the whole batch.
        whole: initial weights, optimizer state and tables by name, as one device or a checkpoint has them.
        mindspore_kernels: MindSpore's CPU kernels instead of numpy wherever there is one.
        limits: how many limits of norm and loss the step is given.
        watches: whether it gives back sums for the health figures, too (:mod:`mindllm.train.watched`).
        groups: how many groups of weights with a learning rate of their own.
        last_stage: the stage with the loss (None: the one with the highest number).

    ``returned`` has by rank what its last step gave back: loss, norm, whether all is finite, tokens.
    """

    def __init__(
        self,
        graphs: Sequence[CompiledGraph],
        stages: int,
        slices: int,
        whole: Mapping[str, Any],
        mindspore_kernels: bool = False,
        observer: Observer | None = None,
        limits: int = 0,
        watches: bool = False,
        groups: int = 0,
        last_stage: int | None = None,
    ) -> None:
        self.limits, self.watches, self.groups = limits, watches, groups
        self.stage_devices = len(graphs) // stages
        first = (stages - 1 if last_stage is None else last_stage) * self.stage_devices
        self.with_loss = slice(first, first + self.stage_devices)
        self.slices = slices
        self.returned: dict[int, tuple[Any, ...]] = {}
        self.machines = [
            RankInterpreter(graph, initial_parts(graph, whole), mindspore_kernels, observer) for graph in graphs
        ]

    def step(
        self,
        batch: Mapping[str, np.ndarray],
        rate: float,
        scale: float,
        spoiled: int | None = None,
        limits: Sequence[float] = (),
        group_rates: Sequence[float] = (),
    ) -> ClusterStep:
        """Execute an optimizer step on a global batch ``[batch, seq]``.

        With ``spoiled``, one element of one weight's gradient overflows on that rank (-1: the last one), and nowhere else.

        Raises:
            Deadlock: ranks that wait for each other.
            RunFailed: the rank to spoil computes no gradient of a weight; a rank whose compiled step has lost a result.
        """
        further = (*(limits or [np.inf] * self.limits), *(group_rates or [rate] * self.groups))
        scalars = tuple(map(np.float32, (rate, scale, *further)))
        inputs = {
            machine.rank: (*rows_of(batch, machine.rank, self.stage_devices, self.slices), *scalars)
            for machine in self.machines
        }
        with np.errstate(all="ignore"), overflowing(self.machines, spoiled) as where:
            outputs = Lockstep(self.machines, inputs).run()
        for rank, given in outputs.items():
            if len(given) != STEP_OUTPUTS + self.watches:
                expected = STEP_OUTPUTS + self.watches
                raise RunFailed(f"rank {rank}: its step gives back {len(given)} values, not {expected}")
        self.returned = outputs
        columns = list(zip(*(outputs[machine.rank] for machine in self.machines), strict=True))
        losses, norms = (tuple(map(float, column)) for column in columns[:2])
        return ClusterStep(
            loss=losses[self.with_loss][-1],
            losses=losses[self.with_loss],
            norms=norms,
            overflows=tuple(not bool(finite) for finite in columns[2]),
            tokens=tuple(map(int, columns[3])),
            spoiled=where.scope,
        )

    def local_state(self) -> dict[int, RankTensors]:
        """By rank the parts of the weights and of the optimizer state it keeps: what a checkpoint is saved from."""
        return {machine.rank: _held(machine) for machine in self.machines}

    def counts(self) -> dict[str, np.ndarray]:
        """Return the counters of the last step by name. All ranks of a stage have the same ones."""
        return {
            name: parameter.value
            for machine in self.machines
            for name, parameter in machine.parameters.items()
            if name.startswith(LOAD) and parameter.value.any()
        }

    def watched(self, names: Sequence[str]) -> np.ndarray:
        """Sums of squares over whole weights ``[kinds, weights]``, float64: of each part those of the first rank that has it."""
        sums = [np.where(_first(one, names), self.returned[one.rank][-1], 0.0) for one in self.machines]
        return np.sum(sums, axis=0, dtype=np.float64)

    def largest_logits(self) -> dict[str, float]:
        """Return the largest attention logit of the last step on all ranks, by layer."""
        largest: dict[str, float] = {}
        for machine in self.machines:
            values = {name: parameter.value for name, parameter in machine.parameters.items()}
            for layer, value in max_logits_by_layer(values).items():
                largest[layer] = max(value, largest.get(layer, value))
        return largest

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Replace every rank's parts of these whole tensors, weights or optimizer state."""
        for machine in self.machines:
            put_parts(machine, arrays)


def rows_of(batch: Mapping[str, np.ndarray], rank: int, stage_devices: int, slices: int) -> list[np.ndarray]:
    """Return the rows of a global batch that a rank's dataset gives it, with columns in the order of the graph's inputs."""
    index = rank % stage_devices * slices // stage_devices
    return [np.split(column, slices)[index] for column in batch.values()]


def _first(machine: RankInterpreter, names: Sequence[str]) -> list[bool]:
    """Return, for each weight, whether this rank updates a part of it that no earlier rank has."""
    parameters = machine.graph.parameters
    owned = [f"{MOMENT_PREFIXES[0]}{name}" in parameters for name in names]
    layouts = [parameters[name].layout if own else None for name, own in zip(names, owned, strict=True)]
    return [
        own and (layout is None or layout.copies_before(machine.rank) == 0)
        for own, layout in zip(owned, layouts, strict=True)
    ]


def _held(machine: RankInterpreter) -> RankTensors:
    parts = state_parts(machine)
    return RankTensors(
        weights={name: part for name, part in parts.items() if not is_state(name)},
        optimizer={name: part for name, part in parts.items() if is_state(name)},
    )
