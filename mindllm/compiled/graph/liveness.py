"""Peak memory of a rank from its compiled graph alone: an estimate for machines that cannot run MindSpore's dry run.

Every tensor is alive from the operation that writes it to the last one that reads it; parameters and constants always are.
Operations run in the order MindSpore's back end gives them (``execution_order``), which decides most of the peak; sizes are
rounded as its pool of device memory does (``AlignMemorySize``: 32 bytes more, then multiples of 512).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mindllm.compiled.graph import cost
from mindllm.compiled.graph.compiled_graph import CONSTANT, CompiledGraph, Node, OtherType, TensorType
from mindllm.compiled.graph.execution_order import VIRTUAL
from mindllm.compiled.graph.unrolled import Memory, Unrolled, unroll

ALIGNMENT, MARGIN = 512, 32
PARAMETER, INPUT, CONSTANT_VALUE, OUTPUT = "parameter", "input", "constant", "output"


@dataclass(frozen=True)
class Block:
    """A piece of memory: alive from operation ``start`` to operation ``end``, both included. ``size`` is in bytes.

    ``kind`` is ``parameter`` or ``constant`` (always alive), ``input`` of the step, or ``output`` of the operator ``node``;
    ``memory`` is what operations read and write it as.
    """

    kind: str
    name: str
    size: int
    start: int
    end: int
    node: Node | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class Liveness:
    """Memory of one step of a rank, block by block. An estimate: gaps between blocks and kernels' workspace are not in it."""

    rank: int
    blocks: tuple[Block, ...]
    step: Unrolled

    @cached_property
    def over_time(self) -> tuple[int, ...]:
        """Bytes in use during each operation."""
        changes = [0] * (len(self.step.operations) + 1)
        for block in self.blocks:
            changes[block.start] += block.size
            changes[block.end + 1] -= block.size
        used, total = [], 0
        for change in changes[:-1]:
            total += change
            used.append(total)
        return tuple(used)

    @property
    def peak(self) -> int:
        """The most bytes in use during any operation."""
        return max(self.over_time)

    @property
    def peak_time(self) -> int:
        """The first operation during which they are."""
        return self.over_time.index(self.peak)

    def alive(self, time: int) -> list[Block]:
        """The blocks in use during an operation, the largest first."""
        return sorted(
            (block for block in self.blocks if block.start <= time <= block.end), key=lambda block: -block.size
        )


def estimate(graph: CompiledGraph, on_cpu: bool = False) -> Liveness:
    """Peak memory of a step of ``graph``.

    ``on_cpu``: as the CPU back end runs it, where a branch is a graph of its own and what it is given lives until its end.
    """
    step = unroll(graph)
    last = len(step.operations) - 1
    return Liveness(graph.rank, (*_standing(graph, last), *_passing(step, last, on_cpu)), step)


def _standing(graph: CompiledGraph, last: int) -> list[Block]:
    """Parameters, and constants that operators use: numbers and tuples lie in a block of their own, too."""
    parameters = [
        Block(PARAMETER, p.name, pool_size(TensorType(p.shape, p.dtype)), 0, last) for p in graph.parameters.values()
    ]
    used = {name for node in graph.nodes() if node.op not in VIRTUAL for name in node.inputs}
    constants = [node for node in graph.find(CONSTANT) if node.name in used and node.value is not None]
    return parameters + [
        Block(CONSTANT_VALUE, node.name, sum(map(pool_size, node.tensors)) or ALIGNMENT, 0, last)
        for node in constants
        if not isinstance(node.value, OtherType)
    ]


def _passing(step: Unrolled, last: int, on_cpu: bool) -> list[Block]:
    """Inputs of the step, up to their last use, and outputs of operations. What the step returns stays to the end."""
    ends: dict[Memory, int] = {}
    for time, operation in enumerate(step.operations):
        ends |= dict.fromkeys(operation.reads, time)
    for branch in step.branches if on_cpu else ():
        ends |= {memory: max(ends.get(memory, 0), branch.last) for memory in branch.inputs}
    ends |= dict.fromkeys(step.results, last)
    inputs = [
        Block(INPUT, memory.name, pool_size(memory.tensor), 0, ends.get(memory, 0), memory=memory)
        for memory in step.inputs
    ]
    outputs = [
        Block(OUTPUT, operation.node.scope, pool_size(made.tensor), time, ends.get(made, time), operation.node, made)
        for time, operation in enumerate(step.operations)
        for made in operation.writes
    ]
    return inputs + outputs


def pool_size(tensor: TensorType) -> int:
    """Bytes the pool takes for a tensor."""
    return (cost.size(tensor) + MARGIN + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
