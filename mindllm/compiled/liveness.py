"""Peak memory of a rank from its compiled graph alone: an estimate for machines that cannot run MindSpore's dry run.

Every tensor is alive from the operation that writes it to the last one that reads it; parameters and constants always are.
Sizes are rounded as MindSpore's pool of device memory does (``AlignMemorySize``: 32 bytes more, then multiples of 512).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from mindllm.compiled import cost
from mindllm.compiled.graph import CONSTANT, CompiledGraph, Node, TensorType, tensors_of
from mindllm.compiled.unrolled import Memory, Unrolled, unroll

ALIGNMENT, MARGIN = 512, 32
PARAMETER, INPUT, CONSTANT_VALUE, OUTPUT = "parameter", "input", "constant", "output"


@dataclass(frozen=True)
class Block:
    """A piece of memory: alive from operation ``start`` to operation ``end``, both included. ``size`` is in bytes.

    ``kind`` is ``parameter``, ``input`` or ``constant`` (always alive) or ``output`` of the operator ``node``.
    """

    kind: str
    name: str
    size: int
    start: int
    end: int
    node: Node | None = None


@dataclass(frozen=True)
class Liveness:
    """Memory of one step of a rank, block by block. An estimate: gaps between blocks and kernels' workspace are not in it."""

    rank: int
    blocks: tuple[Block, ...]
    operations: int

    @cached_property
    def over_time(self) -> tuple[int, ...]:
        """Bytes in use during each operation."""
        changes = [0] * (self.operations + 1)
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


def estimate(graph: CompiledGraph) -> Liveness:
    """Peak memory of a step of ``graph``."""
    step = unroll(graph)
    last = len(step.operations) - 1
    return Liveness(graph.rank, (*_standing(graph, last), *_outputs(step, last)), len(step.operations))


def _standing(graph: CompiledGraph, last: int) -> list[Block]:
    """Parameters, inputs and constants."""
    tensors = [(PARAMETER, p.name, TensorType(p.shape, p.dtype)) for p in graph.parameters.values()]
    tensors += [(INPUT, item.label, tensor) for item in graph.step.inputs for tensor in tensors_of(item.type)]
    tensors += [(CONSTANT_VALUE, node.name, tensor) for node in graph.find(CONSTANT) for tensor in node.tensors]
    return [Block(kind, name, pool_size(tensor), 0, last) for kind, name, tensor in tensors]


def _outputs(step: Unrolled, last: int) -> list[Block]:
    """Outputs of operations; what the step returns stays to the end."""
    ends: dict[Memory, int] = defaultdict(int)
    for time, operation in enumerate(step.operations):
        for memory in operation.reads:
            ends[memory] = time
    ends |= dict.fromkeys(step.results, last)
    return [
        Block(OUTPUT, operation.node.scope, pool_size(memory.tensor), time, max(ends[memory], time), operation.node)
        for time, operation in enumerate(step.operations)
        for memory in operation.writes
    ]


def pool_size(tensor: TensorType) -> int:
    """Bytes the pool takes for a tensor."""
    return (cost.size(tensor) + MARGIN + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
